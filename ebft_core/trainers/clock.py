"""Time spent in optimiser steps, and a budget of it in place of a number of steps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ebft_core.config import TrainerConfig


class StepClock:
    """Counts the seconds of optimiser steps; evaluations, checkpoints and set-up are not counted.

    Args:
        now: seconds of a clock that never goes back.

    Attributes:
        spent: seconds of the steps that are finished, over all attempts.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.spent = 0.0
        self._now = now
        self._mark = now()

    def start(self) -> None:
        """The next step begins now."""
        self._mark = self._now()

    def lap(self) -> float:
        """End a step; the next one begins. Returns its seconds."""
        now = self._now()
        seconds, self._mark = now - self._mark, now
        self.spent += seconds
        return seconds

    @property
    def elapsed(self) -> float:
        """`spent`, and the seconds of the step that is going on."""
        return self.spent + self._now() - self._mark

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside belongs to no step."""
        began = self._now()
        try:
            yield
        finally:
            self._mark += self._now() - began


def time_schedule(optimizer: Optimizer, clock: StepClock, config: TrainerConfig) -> LambdaLR:
    """The learning rate as a function of the share of `max_seconds` that is used."""
    assert config.max_seconds is not None
    budget = config.max_seconds
    return LambdaLR(optimizer, lambda _: rate_factor(min(1.0, clock.elapsed / budget), config))


def rate_factor(share: float, config: TrainerConfig) -> float:
    """Factor of the peak learning rate when this share (0 … 1) of the training is over.

    The shapes are those that the library has for a number of steps.
    """
    warmup = config.warmup_ratio
    if share < warmup:
        return share / warmup
    rest = (share - warmup) / (1.0 - warmup) if warmup < 1.0 else 1.0
    if config.lr_scheduler == "linear":
        return 1.0 - rest
    if config.lr_scheduler == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * rest))
    return 1.0
