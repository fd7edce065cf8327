"""Speaks HTTP with a vLLM server: token ids in, token ids and log-probabilities out, never text.

Every call ends: each attempt has a deadline, the attempts are counted, and the pause between them grows with
jitter. A client may be used by many threads at once.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlparse

import httpx

API_KEY = "VLLM_API_KEY"
"""Environment variable with the key of a server that wants one (vLLM's own name for it)."""

_MAX_CONNECTIONS = 512
_CONNECT_SECONDS = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0
_RETRIED = frozenset({408, 425, 429})
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_PROGRESS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:iteration_tokens_total_count")


class ServerGone(Exception):  # noqa: N818 (an outcome)
    """No attempt got an answer: refused, reset, cut off, too late, or 5xx.

    Args:
        what: the request and what went wrong with its last attempt.
        status: HTTP status of the last attempt; None if there was none.
    """

    def __init__(self, what: str, status: int | None = None) -> None:
        self.status = status
        super().__init__(what)


class RequestRefused(Exception):  # noqa: N818 (an outcome)
    """The server refuses the request; asking again would not help.

    Args:
        status: the HTTP status; 200 where the answer itself cannot be used.
        message: the server's words.
    """

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        self.message = message
        super().__init__(f"{message} (HTTP {status})")


@dataclass(frozen=True)
class Completion:
    """One sampled completion of a prompt.

    Args:
        token_ids: the sampled tokens; a stop token that ended them is the last one.
        logprobs: natural log-probability of each under the distribution it was sampled from (temperature,
            penalties, top-k, top-p and min-p applied).
        finish_reason: `stop` (a stop token) or `length` (`max_tokens`, or the server's context is full).
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


@dataclass(frozen=True)
class ServedModel:
    """A name the server answers to; `parent` is the base model's name where it is an adapter."""

    name: str
    parent: str | None
    root: str | None
    max_model_len: int | None


class VLLMClient:
    """A connection pool to one server.

    Args:
        url: `http://host:port`.
        model_name: name of the base model; requests take it unless they name another.
        timeout: seconds of one attempt, from connecting to the last byte.
        attempts: tries per request; those of one request together take at most `timeout * attempts`.
    """

    def __init__(self, url: str, model_name: str, timeout: float = 120.0, attempts: int = 4) -> None:
        self.url = url.rstrip("/")
        self.model_name = model_name
        self.timeout = timeout
        self.attempts = attempts
        key = os.environ.get(API_KEY)
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=_MAX_CONNECTIONS, max_keepalive_connections=64),
            trust_env=urlparse(self.url).hostname not in _LOOPBACK,  # a proxy does not know our loopback
        )
        self._jitter = random.Random()

    def complete(
        self,
        prompt_ids: Sequence[int],
        *,
        n: int = 1,
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
        model: str | None = None,
        timeout: float | None = None,
        attempts: int | None = None,
    ) -> list[Completion]:
        """`n` completions of a prompt.

        Exactly `stop_token_ids` end a completion: the model's own end-of-sequence token does so only if it
        is among them. The server shortens `max_tokens` to what its context leaves room for.

        Raises:
            ServerGone: no answer.
            RequestRefused: a prompt that is too long, an unknown model or token id, an unusable answer.
        """
        body = {
            "model": model or self.model_name,
            "prompt": list(prompt_ids),
            "n": n,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "stop_token_ids": list(stop_token_ids),
            "ignore_eos": True,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        answer = self._json("/v1/completions", body, timeout, attempts)
        choices = sorted(_list(answer, "choices"), key=lambda choice: int(choice.get("index", 0)))
        if len(choices) != n:
            raise RequestRefused(200, f"{n} completions were asked for, {len(choices)} came")
        return [_completion(choice) for choice in choices]

    def score(self, token_ids: Sequence[int], model: str | None = None) -> list[float]:
        """Log-probability of each token but the first, given those before it, at temperature 1.

        Raises:
            ServerGone, RequestRefused: as `complete`.
        """
        body = {
            "model": model or self.model_name,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        choice = _list(self._json("/v1/completions", body), "choices")[0]
        entries = _list(choice, "prompt_logprobs")
        if len(entries) != len(token_ids):
            raise RequestRefused(200, f"{len(token_ids)} tokens were to be scored, {len(entries)} came back")
        try:
            return [
                _finite(entry[str(token)]["logprob"])
                for token, entry in zip(token_ids[1:], entries[1:], strict=True)
            ]
        except (KeyError, TypeError) as error:
            raise RequestRefused(200, f"a scored token is missing from the answer: {error!r}") from error

    def load_adapter(self, name: str, path: str) -> None:
        """Make the LoRA adapter in folder `path` (on the server's machine) available as model `name`.

        Raises:
            ServerGone: no answer.
            RequestRefused: the server takes no adapters (status 404 without a JSON error), the name is
                loaded already, or the folder or the adapter's rank does not suit.
        """
        self._adapter("load", {"lora_name": name, "lora_path": path}, done="already been loaded")

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Raises as `load_adapter`; an unknown name is refused."""
        self._adapter("unload", {"lora_name": name}, done="cannot be found")

    def load_weights(self, folder: str) -> None:
        """Replace the base model's weights by those in `folder`, on the server's machine, as it runs.

        Requests under way are finished before; cached prefixes are forgotten.

        Raises:
            RequestRefused: the server does not offer this (status 404), or did not forget its prefixes.
            ServerGone: no answer, or it failed on the way: which weights it has is then unknown.
        """
        self._request("POST", "/pause?mode=wait", None, None, None)
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        self._request("POST", "/collective_rpc", body, None, None)
        if not self._json("/reset_prefix_cache", None).get("success"):
            raise RequestRefused(200, "cached prefixes of the old weights are still in use")
        self._request("POST", "/resume", None, None, None)

    def models(self, *, timeout: float | None = None, attempts: int | None = None) -> list[ServedModel]:
        """What the server serves: its base model and the adapters loaded now."""
        answer = _decoded(self._request("GET", "/v1/models", None, timeout, attempts))
        return [
            ServedModel(
                str(entry.get("id")), entry.get("parent"), entry.get("root"), entry.get("max_model_len")
            )
            for entry in _list(answer, "data")
        ]

    def health(self, *, timeout: float = 5.0) -> bool:
        """Whether the server says, within one attempt, that it is well."""
        try:
            self._request("GET", "/health", None, timeout, 1)
        except (ServerGone, RequestRefused):
            return False
        return True

    def progress(self, *, timeout: float = 5.0) -> str:
        """The counters that move while the server works; equal answers mean that nothing was computed."""
        text = self._request("GET", "/metrics", None, timeout, 1).decode("utf-8", errors="replace")
        return "\n".join(line for line in text.splitlines() if line.startswith(_PROGRESS))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _adapter(self, verb: str, body: dict[str, str], done: str) -> None:
        """Load or unload; on a repeated attempt the state asked for may be there already."""
        path = f"/v1/{verb}_lora_adapter"
        tries: list[int] = []
        try:
            self._request("POST", path, body, None, None, tries)
        except RequestRefused as error:
            if len(tries) > 1 and done in error.message:  # the answer to the first attempt was lost
                return
            raise
        except ServerGone as error:
            # vLLM says 500 to an adapter that does not suit (its rank, its modules), and is well.
            if error.status == httpx.codes.INTERNAL_SERVER_ERROR and self.health():
                raise RequestRefused(error.status, str(error)) from error
            raise

    def _json(
        self,
        path: str,
        body: dict[str, Any] | None,
        timeout: float | None = None,
        attempts: int | None = None,
    ) -> dict[str, Any]:
        return _decoded(self._request("POST", path, body, timeout, attempts))

    def _request(
        self,
        method: str,
        path: str,
        body: object,
        timeout: float | None,
        attempts: int | None,
        tries: list[int] | None = None,
    ) -> bytes:
        """The body of a 2xx answer; `tries` gets an entry per attempt."""
        seconds = self.timeout if timeout is None else timeout
        count = self.attempts if attempts is None else attempts
        deadline = time.monotonic() + seconds * count
        problem, status = "", None
        for attempt in range(count):
            if tries is not None:
                tries.append(attempt)
            try:
                return self._attempt(method, path, body, min(deadline, time.monotonic() + seconds))
            except (httpx.TransportError, _Late, _ServerFault) as error:
                problem = str(error) or type(error).__name__
                status = error.status if isinstance(error, _ServerFault) else None
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt) * self._jitter.uniform(0.5, 1.5)
            if attempt + 1 == count or time.monotonic() + pause > deadline:
                break
            time.sleep(pause)
        raise ServerGone(f"{method} {self.url}{path}: {problem} ({attempt + 1} attempt(s))", status)

    def _attempt(self, method: str, path: str, body: object, deadline: float) -> bytes:
        left = max(0.001, deadline - time.monotonic())
        limits = httpx.Timeout(left, connect=min(left, _CONNECT_SECONDS))
        with self._http.stream(method, path, json=body, timeout=limits) as response:
            content = bytearray()
            for chunk in response.iter_bytes():
                content += chunk
                if time.monotonic() > deadline:  # httpx bounds each read, not their sum
                    raise _Late("the answer came too slowly")
        status = response.status_code
        if status >= 500 or status in _RETRIED:
            raise _ServerFault(status, _message(bytes(content)))
        if not 200 <= status < 300:
            raise RequestRefused(status, _message(bytes(content)))
        return bytes(content)


class _Late(Exception):  # noqa: N818
    pass


class _ServerFault(Exception):  # noqa: N818
    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(f"HTTP {status}: {message}")


def _completion(choice: dict[str, Any]) -> Completion:
    tokens = _list(choice, "token_ids")
    logprobs = _list(choice.get("logprobs") or {}, "token_logprobs")
    if len(tokens) != len(logprobs):
        raise RequestRefused(200, f"{len(tokens)} tokens came with {len(logprobs)} log-probabilities")
    return Completion(
        [int(token) for token in tokens], [_finite(x) for x in logprobs], str(choice.get("finish_reason"))
    )


def _finite(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestRefused(200, f"a log-probability is {value!r}")
    return float(value)


def _list(data: dict[str, Any], key: str) -> list[Any]:
    value = data.get(key)
    if not isinstance(value, list):
        raise RequestRefused(
            200, f"the answer has no `{key}`; is this a vLLM server of version 0.22 or later?"
        )
    return value


def _decoded(content: bytes) -> dict[str, Any]:
    try:
        data = json.loads(content)
    except ValueError as error:
        raise RequestRefused(200, f"the answer is not JSON: {content[:80]!r}") from error
    if not isinstance(data, dict):
        raise RequestRefused(200, f"the answer is not an object: {content[:80]!r}")
    return data


def _message(content: bytes) -> str:
    """The text inside vLLM's error object; else the beginning of the body."""
    text = content.decode("utf-8", errors="replace").strip()
    try:
        data = json.loads(text)
        error = data.get("error", data)
        return str(error.get("message") or error.get("detail") or text)[:500]
    except (ValueError, AttributeError):
        return text[:500]
