"""The report's answers: what base and tuned model made of the problems of each downstream task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.report_rollouts import Passage, beginning_of, end_of


@dataclass(frozen=True)
class AnswerView:
    """A problem on the page, with the answers of both models."""

    task: str
    prompt: Passage
    expected: Passage
    base: list[Passage]
    tuned: list[Passage]


def answer_views(path: Path) -> list[AnswerView]:
    """The problems of an `answers.json`; none if it was not written."""
    if not path.exists():
        return []
    document = json.loads(path.read_text(encoding="utf-8"))
    return [
        AnswerView(
            base["task"],
            end_of(base["prompt"]),
            beginning_of(base["expected"]),
            _answers(base),
            _answers(tuned),
        )
        for base, tuned in zip(document["base"], document["tuned"], strict=True)
    ]


def _answers(record: Mapping[str, Any]) -> list[Passage]:
    verdicts = record["verdicts"] or [""] * len(record["answers"])
    return [
        beginning_of(text, caption=verdict) for text, verdict in zip(record["answers"], verdicts, strict=True)
    ]
