"""Groups of completions on their way into an optimiser step: who fails, who stands in for whom.

A group that failed, or whose samples all have the same advantage, teaches nothing. Its place goes to a group
that was written again after a failure, or to one with a signal from an earlier step. Whole groups are
exchanged, so diversity and whitening always see the samples of one prompt together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ebft_core.samplers.prompts import Group


@dataclass(frozen=True)
class Candidate:
    """A row with its completions.

    Attributes:
        version: optimiser steps behind the weights they were sampled from.
    """

    row: Mapping[str, Any]
    group: Group
    version: int

    @property
    def failed(self) -> bool:
        """Whether any of its samples is missing: a group is used whole or not at all."""
        return any(sample is None for sample in self.group.samples)


class StandIns:
    """Groups that wait for a place, and prompts that wait for another try.

    Args:
        replay_size: groups with a signal that are remembered; 0: none.
        max_rerolls: further tries of a prompt that failed.
    """

    def __init__(self, replay_size: int, max_rerolls: int) -> None:
        self._written_again: deque[Candidate] = deque()
        self._replay: deque[Candidate] = deque(maxlen=replay_size)
        self._max_rerolls = max_rerolls
        self._tries: dict[int, int] = {}
        self._again: list[Mapping[str, Any]] = []

    def note_failures(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Put failed prompts down for another try; return those that have none left."""
        given_up = []
        for candidate in candidates:
            if not candidate.failed:
                continue
            row_id = candidate.group.row_id
            self._tries[row_id] = self._tries.get(row_id, 0) + 1
            if self._tries[row_id] > self._max_rerolls:
                given_up.append(candidate)
            else:
                self._again.append(candidate.row)
        return given_up

    def rows_to_try_again(self) -> list[Mapping[str, Any]]:
        """Rows to be asked for once more, with the next generation; each is named once."""
        rows, self._again = self._again, []
        return rows

    def add_written_again(self, candidates: Sequence[Candidate]) -> None:
        """Take in the groups of rows that were asked for once more."""
        self.note_failures(candidates)
        for candidate in candidates:
            if not candidate.failed:
                self._tries.pop(candidate.group.row_id, None)
                self._written_again.append(candidate)

    def remember(self, candidate: Candidate) -> None:
        """Keep a group with a signal for later steps."""
        self._replay.append(candidate)

    def next(self) -> Candidate | None:
        """A group for a free place: one written again, else the oldest remembered; None if there is none."""
        if self._written_again:
            return self._written_again.popleft()
        return self._replay.popleft() if self._replay else None
