"""The order of rows, generation ahead of training, and who stands in for whom."""

from __future__ import annotations

import pytest

from ebft_core.samplers.prompts import Group, PromptRequest, Sample
from ebft_core.trainers.groups import Candidate, StandIns
from ebft_core.trainers.schedule import RolloutQueue, RowSchedule
from tests.structured_fixtures import (
    FakeSampler,
    rows,
)


class TestSchedule:
    def test_every_epoch_reads_every_row_once_in_another_order(self) -> None:
        schedule = RowSchedule(rows(12), batch_size=4, max_steps=6, num_iterations=1, seed=3)  # type: ignore[arg-type]
        read = [schedule[i]["row_id"] for i in range(len(schedule))]
        assert sorted(read[:12]) == sorted(read[12:]) == list(range(12))
        assert read[:12] != read[12:]
        again = RowSchedule(rows(12), batch_size=4, max_steps=6, num_iterations=1, seed=3)  # type: ignore[arg-type]
        assert [again[i]["row_id"] for i in range(24)] == read

    def test_iterations_share_rows(self) -> None:
        schedule = RowSchedule(rows(12), batch_size=4, max_steps=5, num_iterations=2, seed=3)  # type: ignore[arg-type]
        steps = [[schedule[4 * s + i]["row_id"] for i in range(4)] for s in range(5)]
        assert steps[0] == steps[1] != steps[2] == steps[3] != steps[4]
        assert schedule.generations == 3
        assert [row["row_id"] for row in schedule.rows_of(1)] == steps[2]


class TestQueue:
    @staticmethod
    def queue(sampler: FakeSampler, depth: int, last: int = 5) -> RolloutQueue:
        def requests(generation: int) -> list[PromptRequest]:
            return [PromptRequest(100 * generation + i, [2, 3], [], 6) for i in range(3)]

        return RolloutQueue(sampler, requests, last=last, depth=depth, seed=0)

    def test_runs_ahead_no_further_than_asked_and_not_beyond_the_end(self) -> None:
        sampler = FakeSampler()
        queue = self.queue(sampler, depth=2, last=4)
        versions = [queue.take(g, version=g, oldest=g - 2).version for g in range(4)]
        assert versions == [0, 0, 0, 1]
        assert sorted(ids[0] // 100 for _, ids in sampler.calls) == [0, 1, 2, 3]

    def test_what_is_too_old_is_written_anew(self) -> None:
        sampler = FakeSampler()
        queue = self.queue(sampler, depth=1)
        queue.take(0, version=0, oldest=0)
        taken = queue.take(1, version=7, oldest=7)
        assert taken.version == 7
        assert [g.row_id for g in taken.groups] == [100, 101, 102]

    def test_an_error_reaches_whoever_takes_the_generation(self) -> None:
        def boom(call: int, request: PromptRequest) -> bool:
            if request.row_id >= 100:
                raise OSError("no server")
            return False

        queue = self.queue(FakeSampler(boom), depth=1)
        queue.take(0, version=0, oldest=0)
        with pytest.raises(OSError, match="no server"):
            queue.take(1, version=1, oldest=0)


def test_stand_ins_written_again_come_first_and_tries_end() -> None:
    def candidate(row_id: int, failed: bool = False) -> Candidate:
        sample = None if failed else Sample([2], [True], [-1.0], False)
        return Candidate({"row_id": row_id}, Group(row_id, [sample]), 0)

    stand_ins = StandIns(replay_size=2, max_rerolls=1)
    for row_id in (1, 2, 3):
        stand_ins.remember(candidate(row_id))
    assert stand_ins.note_failures([candidate(7, failed=True), candidate(8)]) == []
    assert [row["row_id"] for row in stand_ins.rows_to_try_again()] == [7]
    assert stand_ins.rows_to_try_again() == []
    stand_ins.add_written_again([candidate(7)])
    order = [stand_ins.next() for _ in range(4)]
    assert [None if c is None else c.group.row_id for c in order] == [7, 2, 3, None]
    stand_ins.note_failures([candidate(9, failed=True)])
    given_up = stand_ins.note_failures([candidate(9, failed=True)])
    assert [c.group.row_id for c in given_up] == [9]
