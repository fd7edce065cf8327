"""Completions from a vLLM server: HTTP, token ids in and out, many requests at once.

The first turn of all N samples is one request; behind it every sample goes on by itself, on its own history.
A request that fails for good costs its own samples and nothing else. Where a server went away and came back,
the groups it took along are written again from their beginning.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

from ebft_core.config import RunConfig
from ebft_core.rows import mix_seed
from ebft_core.samplers.prompts import Conversation, Group, PromptRequest
from ebft_core.samplers.protocol import OnGroup
from ebft_core.vllm.client import Completion, RequestRefused, ServerGone, VLLMClient

logger = logging.getLogger(__name__)

MAX_REQUESTS = 256
"""Requests under way at once: beyond that a server only queues them."""

_SEED_BITS = 16  # of the 63 of a mixed seed that stay free: the server adds the number of the sample
_UNKNOWN_MODEL = 404


class Published(Protocol):
    """Who knows which weights the server has: a publisher of `ebft_core.vllm.sync`."""

    def name_of(self, version: int) -> str:
        """The model's name in requests."""
        ...

    @property
    def restarts(self) -> int:
        """Restarts of the server noticed so far."""
        ...

    def recover(self) -> None:
        """Wait until the server answers and publish again what a restart took from it."""
        ...


class UnusableAnswer(Exception):  # noqa: N818 (an outcome)
    """The server answered with a completion that is none."""


class VLLMSampler:
    """A `Sampler` by HTTP.

    Args:
        client: with the run's time limit and attempts per request (see `connect`).
        config: N, temperature and the other sampling parameters.
        stop_token_ids: tokens that end a turn; they belong to it.
        published: names of versions; help when the server is gone.
    """

    def __init__(
        self, client: VLLMClient, config: RunConfig, stop_token_ids: Sequence[int], published: Published
    ) -> None:
        self._client = client
        self._ebft = config.ebft
        self._stops = frozenset(stop_token_ids)
        self._published = published

    def sample(
        self, requests: Sequence[PromptRequest], *, seed: int, version: int, on_group: OnGroup | None = None
    ) -> list[Group]:
        """One group per request, in their order; see `Sampler`.

        Raises:
            ServerGone: nobody answered any request, and the server was not restarted either.
            ServerLost: it will not come back.
        """
        model = self._published.name_of(version)
        groups: dict[int, Group] = {}
        waiting = dict(enumerate(requests))
        while waiting:
            restarts = self._published.restarts
            lost: list[_Work] = []
            with closing(self._written(waiting, seed, model)) as finished:
                for work in finished:
                    if work.gone:
                        lost.append(work)
                    else:
                        groups[work.index] = _hand_over(work.group(), on_group)
            if not lost:
                break
            self._published.recover()
            if self._published.restarts > restarts:
                waiting = {work.index: work.request for work in lost}
                continue
            if len(lost) == len(requests):
                raise ServerGone(str(lost[0].problem))
            groups |= {work.index: _hand_over(work.group(), on_group) for work in lost}
            break
        return [groups[index] for index in range(len(requests))]

    def _written(
        self, requests: dict[int, PromptRequest], seed: int, model: str
    ) -> Generator[_Work, None, None]:
        """The groups as they finish, in any order."""
        N = self._ebft.n_samples_per_prompt
        threads = _Threads(
            min(MAX_REQUESTS, len(requests) * N),
            lambda work, samples: self._write_turn(work, samples, seed, model),
        )
        try:
            for index, request in requests.items():
                threads.start(_Work.of(index, request, N), list(range(N)))
            unfinished = len(requests)
            while unfinished:
                work, samples, error = threads.result()
                work.note(samples, error)
                for sample in work.open(samples):
                    threads.start(work, [sample])
                if work.done:
                    unfinished -= 1
                    yield work
        finally:
            threads.end()

    def _write_turn(self, work: _Work, samples: list[int], seed: int, model: str) -> None:
        """The next turn of samples with the same history (all in the first turn, one later on)."""
        conversations = [work.conversations[sample] for sample in samples]
        first = conversations[0]
        ebft = self._ebft
        completions = self._client.complete(
            first.history,
            n=len(samples),
            max_tokens=first.room,
            temperature=ebft.temperature,
            top_p=ebft.top_p,
            top_k=ebft.top_k,
            min_p=ebft.min_p,
            repetition_penalty=ebft.repetition_penalty,
            stop_token_ids=sorted(self._stops),
            seed=mix_seed(seed, work.request.row_id, samples[0], first.turn) >> _SEED_BITS,
            model=model,
        )
        for completion in completions:
            self._check(completion, first.room)
        for conversation, completion in zip(conversations, completions, strict=True):
            ended = completion.finish_reason == "stop"
            conversation.write(completion.token_ids, completion.logprobs, ended=ended)
            if not ended:
                conversation.stop()

    def _check(self, completion: Completion, room: int) -> None:
        tokens, reason = completion.token_ids, completion.finish_reason
        if reason not in ("stop", "length") or not 1 <= len(tokens) <= room:
            raise UnusableAnswer(
                f"{len(tokens)} tokens came, {room} were asked for; finish_reason {reason!r}"
            )
        if (reason == "stop") != (tokens[-1] in self._stops):
            raise UnusableAnswer(f"finish_reason is {reason!r}, the last token {tokens[-1]}")


def connect(url: str, model_name: str, config: RunConfig) -> VLLMClient:
    """A client with the run's time limit and attempts per request."""
    return VLLMClient(url, model_name, config.rollout.request_timeout, config.rollout.request_attempts)


@dataclass
class _Work:
    """A group while it is written; only `_write_turn` runs outside the caller's thread.

    Attributes:
        failed: samples that will not be finished.
        problem: why, for the last of them.
        gone: because of the server; the whole group can be written again.
    """

    index: int
    request: PromptRequest
    conversations: list[Conversation]
    failed: set[int] = field(default_factory=set)
    problem: str | None = None
    gone: bool = False
    under_way: int = 1

    @classmethod
    def of(cls, index: int, request: PromptRequest, n_samples: int) -> _Work:
        return cls(index, request, [Conversation(request) for _ in range(n_samples)])

    def note(self, samples: list[int], error: Exception | None) -> None:
        """Take in how a turn of these samples ended; errors that are no answer's are raised."""
        self.under_way -= 1
        if error is None:
            return
        if not isinstance(error, ServerGone | RequestRefused | UnusableAnswer):
            raise error
        self.failed.update(samples)
        self.problem = str(error)
        if isinstance(error, ServerGone) or getattr(error, "status", None) == _UNKNOWN_MODEL:
            self.gone = True  # a restarted server does not know the adapter

    def open(self, samples: list[int]) -> list[int]:
        """Those of the samples that have another turn to write; they count as under way."""
        found = [j for j in samples if j not in self.failed and self.conversations[j].room > 0]
        self.under_way += len(found)
        return found

    @property
    def done(self) -> bool:
        return self.under_way == 0

    def group(self) -> Group:
        samples = [None if j in self.failed else c.finish() for j, c in enumerate(self.conversations)]
        return Group(self.request.row_id, samples, self.problem)


class _Threads:
    """Threads that write turns. Daemons, so that a run that stops does not wait for a server's answer."""

    def __init__(self, count: int, write: Callable[[_Work, list[int]], None]) -> None:
        self._write = write
        self._ended = False
        self._turns: SimpleQueue[tuple[_Work, list[int]] | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[_Work, list[int], Exception | None]] = SimpleQueue()
        self._count = count
        for number in range(count):
            threading.Thread(target=self._run, name=f"request-{number}", daemon=True).start()

    def start(self, work: _Work, samples: list[int]) -> None:
        self._turns.put((work, samples))

    def result(self) -> tuple[_Work, list[int], Exception | None]:
        """The next turn that is over, and the error that ended it."""
        return self._results.get()

    def end(self) -> None:
        """Start nothing more; what is under way ends by itself."""
        self._ended = True
        for _ in range(self._count):
            self._turns.put(None)

    def _run(self) -> None:
        while (turn := self._turns.get()) is not None and not self._ended:
            error: Exception | None = None
            try:
                self._write(*turn)
            except Exception as caught:  # noqa: BLE001 (handed to the caller's thread)
                error = caught
            self._results.put((*turn, error))


def _hand_over(group: Group, on_group: OnGroup | None) -> Group:
    if group.problem is not None:
        failed = sum(sample is None for sample in group.samples)
        logger.warning("row %d: %d completions failed: %s", group.row_id, failed, group.problem)
    if on_group is not None:
        on_group(group)
    return group
