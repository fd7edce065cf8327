"""Which rows each optimiser step of structured mode trains on, and completions written ahead of it.

The order of the rows is fixed by the seed before training starts, so what step s + k will need is known at
step s: its prompts can be sent to the server while step s trains.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils.data import Dataset

from ebft_core.rows import mix_seed
from ebft_core.samplers.prompts import Group, PromptRequest
from ebft_core.samplers.protocol import OnGroup, Sampler

Row = Mapping[str, Any]


class RowSchedule(Dataset[Row]):
    """Rows in the order in which optimiser steps read them; every epoch has an order of its own.

    Args:
        rows: the training rows.
        batch_size: rows per optimiser step.
        max_steps: optimiser steps of the run.
        num_iterations: optimiser steps that share the same rows (and their completions).
        seed: of the order.
    """

    def __init__(
        self, rows: Dataset[Any], *, batch_size: int, max_steps: int, num_iterations: int, seed: int
    ) -> None:
        self._rows: Any = rows
        self._batch_size = batch_size
        self._max_steps = max_steps
        self._num_iterations = num_iterations
        self._order = lru_cache(maxsize=2)(
            lambda epoch: torch.randperm(
                len(self._rows), generator=torch.Generator().manual_seed(mix_seed(seed, epoch))
            ).tolist()
        )

    @property
    def generations(self) -> int:
        """Batches of completions that the run needs."""
        return -(-self._max_steps // self._num_iterations)

    def generation_of(self, step: int) -> int:
        """Number of the batch of completions that optimiser step `step` (from 0) trains on."""
        return step // self._num_iterations

    def rows_of(self, generation: int) -> list[Row]:
        """The rows of a batch of completions."""
        return [self._row(generation * self._batch_size + i) for i in range(self._batch_size)]

    def __len__(self) -> int:
        return self._max_steps * self._batch_size

    def __getitem__(self, index: int) -> Row:
        step, place = divmod(index, self._batch_size)
        return self._row(self.generation_of(step) * self._batch_size + place)

    def _row(self, number: int) -> Row:
        epoch, place = divmod(number, len(self._rows))
        row: Row = self._rows[self._order(epoch)[place]]
        return row


@dataclass(frozen=True)
class Generated:
    """The completions of one generation.

    Attributes:
        groups: one per request, in their order.
        version: optimiser steps behind the weights.
        seconds: time it took to write them.
    """

    groups: list[Group]
    version: int
    seconds: float


@dataclass(frozen=True)
class _Order:
    """A generation under way."""

    version: int
    result: Future[Generated]


class RolloutQueue:
    """Asks the sampler for generations, up to `depth` of them ahead of the one that is needed.

    Args:
        requests_of: the prompts of a generation; called in the trainer's thread.
        last: number of generations of the run; nothing is written beyond it.
        depth: generations written ahead; 0 writes each one when it is needed, in the caller's thread.
        seed: of the sampling; each generation mixes its number in.
    """

    def __init__(
        self,
        sampler: Sampler,
        requests_of: Callable[[int], Sequence[PromptRequest]],
        *,
        last: int,
        depth: int,
        seed: int,
    ) -> None:
        self._sampler = sampler
        self._requests_of = requests_of
        self._last = last
        self._depth = depth
        self._seed = seed
        self._orders: dict[int, _Order] = {}

    def take(
        self, generation: int, *, version: int, oldest: int, on_group: OnGroup | None = None
    ) -> Generated:
        """The completions of a generation; starts those that come next.

        Args:
            version: the newest published weights; what is started now is sampled from them.
            oldest: completions of older weights are thrown away and written anew.
            on_group: called with each group as it is finished, where nothing is written ahead.

        Raises:
            Whatever the sampler raised.
        """
        if self._depth == 0:
            return self._write(generation, self._requests_of(generation), version, on_group)
        order = self._orders.pop(generation, None)
        if order is None or order.version < oldest:
            order = self._start(generation, version)
        for ahead in range(generation + 1, min(generation + 1 + self._depth, self._last)):
            if ahead not in self._orders:
                self._orders[ahead] = self._start(ahead, version)
        return order.result.result()

    def _start(self, generation: int, version: int) -> _Order:
        result: Future[Generated] = Future()
        requests = self._requests_of(generation)

        def work() -> None:
            try:
                result.set_result(self._write(generation, requests, version, None))
            except Exception as error:  # noqa: BLE001 (handed to whoever takes the generation)
                result.set_exception(error)

        # A daemon: a run that stops does not wait for a server that is still writing.
        threading.Thread(target=work, name=f"rollout-{generation}", daemon=True).start()
        return _Order(version, result)

    def _write(
        self, generation: int, requests: Sequence[PromptRequest], version: int, on_group: OnGroup | None
    ) -> Generated:
        started = time.perf_counter()
        groups = self._sampler.sample(
            requests,
            seed=mix_seed(self._seed, generation),
            version=version,
            on_group=on_group,
        )
        return Generated(groups, version, time.perf_counter() - started)
