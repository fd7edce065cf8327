"""The table of training metrics on Prefect's page."""

from __future__ import annotations

from pathlib import Path

from ebft_core.events import EventWriter
from tasks.training_table import training_table


def test_every_shown_metric_has_its_own_number_of_steps(tmp_path: Path) -> None:
    events = EventWriter(tmp_path / "train.jsonl", "train")
    events.phase("train")
    for step, reward in enumerate([0.5, 1.0, 3.0], start=1):
        synced = {"sync/seconds": 2.0 * step} if step != 2 else {}
        events.metrics(step, {"ebft/reward": reward, "train/learning_rate": 1.0, **synced})
    events.metrics(4, {"ebft/cfm": float("nan")})
    assert training_table(tmp_path / "train.jsonl") == [
        {"metric": "ebft/reward", "steps": "3", "first": "0.5", "last": "3", "mean": "1.5"},
        {"metric": "ebft/cfm", "steps": "1", "first": "nan", "last": "nan", "mean": "nan"},
        {"metric": "sync/seconds", "steps": "2", "first": "2", "last": "6", "mean": "4"},
    ]
    assert training_table(tmp_path / "none.jsonl") == []
