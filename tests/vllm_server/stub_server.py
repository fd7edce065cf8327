"""A small stand-in for vLLM's HTTP server, started by the same command line, that can fail on demand.

Speaks the part of the protocol that the project uses. With weights in `--model` it answers with their true
log-probabilities (transformers on the CPU, adapters through peft); with a `config.json` alone it makes up a
distribution and starts in a moment. Imports nothing of the project, so it is a second opinion about the
protocol, which `test_real_server.py` holds against the real one. A program, never imported.

Faults are read, at the start and at every request, from the JSON file that EBFT_STUB_FAULTS names:

    start_delay: s        listen only after s seconds      die_at_start: text    say text and exit with 1
    die_after: s          exit with 1 after s seconds      ignore_sigterm: true  only SIGKILL helps
    hang: true            no request is answered           hang_engine: true     only /health and /metrics
    slow: s               s seconds per sampled token      model_name: text      another name in /v1/models
    refuse_lora: text     400 with that message            only_start: n         faults of the n-th start only
    fail: {path: {kind: reset | cut | garbage | drip | <status>, times: n}}     the next n requests of a path
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from stub_models import MadeUpModel, Model, TrueModel, log_softmax, processed

FAULTS = "EBFT_STUB_FAULTS"


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message


class Faults:
    """The faults wanted now; those with `times` are used up."""

    def __init__(self) -> None:
        self._path = Path(os.environ[FAULTS]) if os.environ.get(FAULTS) else None
        self._used: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()
        self.start = self._count_starts()

    def _count_starts(self) -> int:
        if self._path is None:
            return 0
        counter = self._path.with_suffix(".starts")
        with open(counter, "a+") as stream:
            stream.seek(0)
            started = len(stream.read().splitlines())
            stream.write(f"{os.getpid()}\n")
        return started

    def now(self) -> dict[str, Any]:
        if self._path is None or not self._path.exists():
            return {}
        faults = json.loads(self._path.read_text())
        return faults if faults.get("only_start", self.start) == self.start else {}

    def take(self, path: str) -> str | None:
        fault = self.now().get("fail", {}).get(path)
        if fault is None:
            return None
        with self._lock:
            key = (path, json.dumps(fault))
            self._used[key] = self._used.get(key, 0) + 1
            return str(fault["kind"]) if self._used[key] <= fault.get("times", 1) else None


class Engine:
    """What the server does, without HTTP."""

    def __init__(self, options: argparse.Namespace, faults: Faults) -> None:
        config = json.loads(Path(options.model, "config.json").read_text())
        has_weights = any(Path(options.model).glob("*.safetensors"))
        self.model: Model = TrueModel(options.model, options.dtype) if has_weights else MadeUpModel(config)
        self.options, self.faults = options, faults
        self.name = options.served_model_name
        self.adapters: dict[str, str] = {}
        self.sampled = self.prompted = 0
        self.paused = False
        self._one_at_a_time = threading.Lock()

    def models(self) -> dict[str, Any]:
        base = self.faults.now().get("model_name", self.name)
        length = self.options.max_model_len
        entries = [{"id": base, "parent": None, "root": self.options.model, "max_model_len": length}]
        entries += [{"id": name, "parent": base, "root": path} for name, path in self.adapters.items()]
        return {"object": "list", "data": entries}

    def load(self, body: dict[str, Any]) -> str:
        name, path = body.get("lora_name"), body.get("lora_path")
        if not name or not path:
            raise Refused(400, "Both 'lora_name' and 'lora_path' must be provided.")
        if message := self.faults.now().get("refuse_lora"):
            raise Refused(400, message)
        if name in self.adapters:
            raise Refused(400, f"The lora adapter '{name}' has already been loaded.")
        config = Path(path, "adapter_config.json")
        if not config.exists():
            raise Refused(404, f"Loading lora {name} failed: No adapter found for {path}")
        rank = json.loads(config.read_text())["r"]
        if not self.options.enable_lora or rank > self.options.max_lora_rank:
            reason = f"LoRA rank {rank} is greater than max_lora_rank {self.options.max_lora_rank}."
            raise Refused(500, f"Call to add_lora method failed: {reason}")
        with self._one_at_a_time:
            self.model.load(name, Path(path))
            self.adapters[name] = path
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, body: dict[str, Any]) -> str:
        name = body.get("lora_name", "")
        if name not in self.adapters:
            raise Refused(404, f"The lora adapter '{name}' cannot be found.")
        with self._one_at_a_time:
            self.model.unload(name)
            del self.adapters[name]
        return f"Success: LoRA adapter '{name}' removed successfully."

    def dev(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/pause?mode=wait":
            self.paused = True
        elif path == "/collective_rpc":
            assert self.paused
            assert body["method"] == "reload_weights"
            self.model = TrueModel(body["kwargs"]["weights_path"], self.options.dtype)
        elif path == "/reset_prefix_cache":
            return {"success": True}
        elif path == "/resume":
            self.paused = False
        else:
            raise Refused(404, "Not Found")
        return {}

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, name = body["prompt"], body["model"]
        if name != self.name and name not in self.adapters:
            raise Refused(404, f"The model `{name}` does not exist.")
        room = self.options.max_model_len - len(prompt)
        if room <= 0:
            raise Refused(400, f"This model's maximum context length is {self.options.max_model_len} tokens.")
        if max(prompt) >= self.model.vocabulary:
            raise Refused(400, f"Token id {max(prompt)} is out of vocabulary")
        adapter = name if name in self.adapters else None
        with self._one_at_a_time:
            self.prompted += len(prompt)
            choices = self._sample(prompt, body, adapter, room)
            if body.get("prompt_logprobs") is not None:
                choices[0]["prompt_logprobs"] = self._prompt_logprobs(prompt, adapter)
        return {"object": "text_completion", "model": name, "choices": choices}

    def _prompt_logprobs(self, prompt: list[int], adapter: str | None) -> list[Any]:
        logprobs = log_softmax(self.model.logits([prompt], adapter)[0])
        rest = zip(prompt[1:], logprobs, strict=False)
        return [None, *({str(token): {"logprob": float(row[token])}} for token, row in rest)]

    def _sample(
        self, prompt: list[int], body: dict[str, Any], adapter: str | None, room: int
    ) -> list[dict[str, Any]]:
        n, stops = body.get("n") or 1, set(body.get("stop_token_ids") or ())
        seed = body.get("seed")
        rngs = [np.random.default_rng(None if seed is None else [seed, index]) for index in range(n)]
        rows: list[list[int]] = [list(prompt) for _ in range(n)]
        found: list[list[float]] = [[] for _ in range(n)]
        ended = [False] * n
        for _ in range(min(body.get("max_tokens") or 16, room)):
            time.sleep(self.faults.now().get("slow", 0.0))
            logits = self.model.logits(rows, adapter)[:, -1]
            for index, row in enumerate(rows):
                logprobs = processed(logits[index], row, body)
                token = int(rngs[index].choice(len(logprobs), p=np.exp(logprobs)))
                row.append(token)
                if not ended[index]:
                    found[index].append(float(logprobs[token]))
                    ended[index] = token in stops
                    self.sampled += 1
            if all(ended):
                break
        return [
            {
                "index": index,
                "token_ids": row[len(prompt) : len(prompt) + len(found[index])],
                "logprobs": {"token_logprobs": found[index]},
                "finish_reason": "stop" if ended[index] else "length",
            }
            for index, row in enumerate(rows)
        ]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}"))

    def _answer(self, body: dict[str, Any]) -> None:
        faults = self.engine.faults
        harmless = self.path in ("/health", "/metrics")
        while faults.now().get("hang") or (faults.now().get("hang_engine") and not harmless):
            time.sleep(0.05)
        kind = faults.take(self.path)
        if kind is not None and kind.isdigit():
            return self._send(int(kind), {"error": {"message": f"injected {kind}"}})
        try:
            status, content = 200, self._route(body)
        except Refused as error:
            status, content = error.status, {"error": {"message": error.message, "code": error.status}}
        return self._send(status, content, kind)

    def _route(self, body: dict[str, Any]) -> Any:
        engine = self.engine
        if self.path == "/health":
            return {}
        if self.path == "/metrics":
            return (
                f"vllm:prompt_tokens_total {engine.prompted}\nvllm:generation_tokens_total {engine.sampled}\n"
            )
        if self.path == "/v1/models":
            return engine.models()
        if self.path == "/v1/completions":
            return engine.complete(body)
        if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1":
            if self.path == "/v1/load_lora_adapter":
                return engine.load(body)
            if self.path == "/v1/unload_lora_adapter":
                return engine.unload(body)
        if os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
            return engine.dev(self.path, body)
        raise Refused(404, "Not Found")

    def _send(self, status: int, content: Any, kind: str | None = None) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        data = b"<html>not JSON" if kind == "garbage" else text.encode()
        if kind == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if kind == "cut":
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
        elif kind == "drip":
            for byte in data:
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                time.sleep(0.05)
        else:
            self.wfile.write(data)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # connections that were cut on purpose


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-lora-rank", type=int, default=16)
    return parser.parse_known_args(arguments)[0]


def main() -> None:
    options, faults = parse(sys.argv[1:]), Faults()
    wanted = faults.now()
    if wanted.get("ignore_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    helper = subprocess.Popen(["sleep", "600"])  # as vLLM has its engine: it must go, too
    print(f"stub of a vLLM server, helper {helper.pid}", flush=True)
    time.sleep(wanted.get("start_delay", 0.0))
    if "die_at_start" in wanted:
        sys.exit(f"RuntimeError: {wanted['die_at_start']}")
    if "die_after" in wanted:
        threading.Timer(wanted["die_after"], os._exit, [1]).start()
    Handler.engine = Engine(options, faults)
    Server((options.host, options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
