"""What a sampler of structured mode is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ebft_core.samplers.prompts import Group, PromptRequest

OnGroup = Callable[[Group], None]


class Sampler(Protocol):
    """Writes N completions of every prompt."""

    def sample(
        self, requests: Sequence[PromptRequest], *, seed: int, version: int, on_group: OnGroup | None = None
    ) -> list[Group]:
        """One group per request, in the order of the requests.

        Args:
            seed: the completions depend on it, on the row and on the weights, not on the other requests.
            version: optimiser steps behind the weights to sample from; they must have been published.
            on_group: called in the caller's thread with every group as soon as it is finished.

        Raises:
            ServerGone: no request was answered and no restarted server was found either.
        """
        ...
