"""Scores the groups of a step while others are still being written."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ebft_core.rows import RowBatch
from ebft_core.samplers.prompts import Group
from ebft_core.trainers.groups import Candidate
from ebft_core.trainers.schedule import Generated, Row
from ebft_core.trainers.step import ScoredRollout


@dataclass(frozen=True)
class Scored:
    """A micro-batch of candidates with what was found out about them.

    Attributes:
        columns: for people, of the user's own rewards: one entry per completion.
    """

    candidates: list[Candidate]
    batch: RowBatch
    rollout: ScoredRollout
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def has_signal(self, place: int) -> bool:
        """Whether the samples of a group differ in advantage."""
        return bool((self.rollout.advantage_RAN[place] != 0).any())


class Arrivals:
    """Scores each micro-batch as soon as its last group has arrived.

    Args:
        rows: of the step's micro-batches.
        score: scores one of them.

    Attributes:
        seconds: time spent scoring inside `add`.
    """

    def __init__(self, rows: Sequence[Sequence[Row]], score: Callable[[list[Candidate]], Scored]) -> None:
        self._score_candidates = score
        self._rows = rows
        self._arrived: dict[
            int, Candidate
        ] = {}  # by row number: a row stands once in a step, or is written alike
        self._scored: dict[int, Scored] = {}
        self.seconds = 0.0

    def add(self, group: Group, version: int) -> None:
        """Take in a group of weights `version`."""
        started = time.perf_counter()
        for number, part in enumerate(self._rows):
            ids = [int(row["row_id"]) for row in part]
            for row, row_id in zip(part, ids, strict=True):
                if row_id == group.row_id:
                    self._arrived[row_id] = Candidate(row, group, version)
            if group.row_id in ids and all(row_id in self._arrived for row_id in ids):
                self._score(number)
        self.seconds += time.perf_counter() - started

    def candidates(self, generated: Generated) -> list[Candidate]:
        """The step's rows with their groups, in order."""
        rows = [row for part in self._rows for row in part]
        groups = generated.groups[: len(rows)]
        return [Candidate(row, group, generated.version) for row, group in zip(rows, groups, strict=True)]

    def finish(self, generated: Generated) -> list[Scored]:
        """All micro-batches, scored."""
        for candidate in self.candidates(generated):
            self._arrived.setdefault(candidate.group.row_id, candidate)
        for number in range(len(self._rows)):
            if number not in self._scored:
                self._score(number)
        return [self._scored[number] for number in range(len(self._rows))]

    def _score(self, number: int) -> None:
        candidates = [self._arrived[int(row["row_id"])] for row in self._rows[number]]
        self._scored[number] = self._score_candidates(candidates)
