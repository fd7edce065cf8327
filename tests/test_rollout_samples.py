"""What training shows of its rollouts: the right texts at the right steps, and no effect on the result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ebft_core.events import EventWriter, read_events
from ebft_core.trainers.samples import CONTEXT_TOKENS, RolloutSamples
from tests.trainer_fixtures import make_config, make_rows, make_trainer, weights


class Numbers:
    """A tokenizer whose text is the ids themselves."""

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids)


def packed_rows() -> list[dict[str, Any]]:
    """Rows of two documents each, whose tokens say which document they are of: below 20, and from 20 on."""
    rows = []
    for first, second in zip(make_rows(8, vocab_size=20), make_rows(8, seed=1, vocab_size=20), strict=True):
        ids = first["input_ids"] + [i + 20 for i in second["input_ids"]]
        lengths = [len(first["input_ids"]), len(second["input_ids"])]
        packed = {"input_ids": ids, "labels": ids, "is_target": [True] * len(ids)}
        rows.append({**first, **packed, "document_lengths": lengths, "prompt_lengths": [0, 0]})
    return rows


def train(tmp_path: Path, rows: list[dict[str, Any]], every: int | None) -> tuple[dict[str, Any], list[Any]]:
    config = make_config(trainer={"max_steps": 6, "save_every": 9})
    journal = tmp_path / f"{every}.jsonl"
    events = EventWriter(journal, "train")
    trainer = make_trainer(tmp_path / str(every), config, rows=rows, events=events)
    trainer.samples = None if every is None else RolloutSamples(events, Numbers(), every)
    trainer.train()
    return weights(trainer), [e for e in read_events(journal) if e["kind"] == "samples"]


def test_every_second_step_one_group_is_shown_with_its_best_and_worst_rollout(tmp_path: Path) -> None:
    rows = packed_rows()
    _, shown = train(tmp_path, rows, 2)
    assert [event["step"] for event in shown] == [2, 4, 6]
    documents = set()
    for event in shown:
        assert 1 <= len(event["rows"]) <= 2
        rewards = [row["reward"] for row in event["rows"]]
        assert rewards == sorted(rewards, reverse=True)
        for row in event["rows"]:
            before = [int(i) for i in row["context"].split()]
            after = [int(i) for i in row["ground_truth"].split()]
            assert 4 <= len(before) <= CONTEXT_TOKENS
            assert len(after) == len(row["sample"].split()) == 4
            assert len({i >= 20 for i in [*before, *after]}) == 1, "a text crosses two documents"
            documents.add(before[0] >= 20)
            text = ",".join(map(str, [*before, *after]))
            assert any(text in ",".join(map(str, r["input_ids"])) for r in rows)
    assert documents == {False, True}, "only first documents were shown"


def test_looking_changes_nothing(tmp_path: Path) -> None:
    rows = packed_rows()
    seen, _ = train(tmp_path, rows, 1)
    unseen, nothing = train(tmp_path, rows, None)
    assert nothing == []
    assert all(torch.equal(seen[name], unseen[name]) for name in unseen)


@pytest.mark.parametrize("every", [3, 5])
def test_steps_that_are_not_due_are_left_out(tmp_path: Path, every: int) -> None:
    _, shown = train(tmp_path, packed_rows(), every)
    assert [event["step"] for event in shown] == [step for step in range(1, 7) if step % every == 0]
