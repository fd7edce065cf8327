"""The report's rollouts: texts cut to a readable length, and the turns marked that no model wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ebft_core.evaluation.summary import CompletionNote, RolloutExample, Spans

_PROMPT_SHOWN = 1500
_TEXT_SHOWN = 800
_WORTH_HIDING = 200
"""Characters: fewer are shown with the rest."""
_NOTHING: Spans = ()


@dataclass(frozen=True)
class Piece:
    """A stretch of a text; `given`: nobody had to write it."""

    text: str
    given: bool


@dataclass(frozen=True)
class Passage:
    """A text for the page: what is shown, and what unfolds before or behind it."""

    earlier: list[Piece]
    shown: list[Piece]
    later: list[Piece]
    caption: str = ""

    @property
    def hidden(self) -> int:
        """Characters that unfold."""
        return sum(len(piece.text) for piece in (*self.earlier, *self.later))


@dataclass(frozen=True)
class RolloutView:
    """An anchor on the page; `whole`: a prompt with its completions, not a place inside a document."""

    whole: bool
    has_given: bool
    context: Passage
    ground_truth: Passage
    base: list[Passage]
    tuned: list[Passage]


def rollout_views(path: Path) -> list[RolloutView]:
    """The examples of a `rollouts.json`; none if it was not written."""
    if not path.exists():
        return []
    document = json.loads(path.read_text(encoding="utf-8"))
    return [rollout_view(values) for values in document["rollouts"]]


def rollout_view(values: Mapping[str, Any]) -> RolloutView:
    """One `RolloutExample`, as JSON has it, cut for the page."""
    example = RolloutExample.from_json(values)
    notes = (*example.base_notes, *example.tuned_notes)
    return RolloutView(
        whole=bool(notes),
        has_given=bool(example.ground_truth_given) or any(note.given for note in notes),
        context=end_of(example.context),
        ground_truth=beginning_of(example.ground_truth, example.ground_truth_given),
        base=_samples(example.base_samples, example.base_alignments, example.base_notes),
        tuned=_samples(example.tuned_samples, example.tuned_alignments, example.tuned_notes),
    )


def _samples(
    texts: Sequence[str], alignments: Sequence[float], notes: Sequence[CompletionNote]
) -> list[Passage]:
    passages = []
    for index, (text, alignment) in enumerate(zip(texts, alignments, strict=True)):
        caption, given = f"alignment {alignment:.3f}", _NOTHING
        if notes:
            note = notes[index]
            caption += f" · {note.tokens} token{'' if note.tokens == 1 else 's'}"
            caption += " · cut at its bound" if note.truncated else ""
            given = note.given
        passages.append(beginning_of(text, given, caption))
    return passages


def beginning_of(text: str, given: Spans = (), caption: str = "") -> Passage:
    """A text whose rest unfolds behind it."""
    if len(text) <= _TEXT_SHOWN + _WORTH_HIDING:
        return Passage([], pieces(text, given), [], caption)
    space = text.rfind(" ", _TEXT_SHOWN - _WORTH_HIDING, _TEXT_SHOWN)
    end = _TEXT_SHOWN if space < 0 else space + 1
    return Passage([], pieces(text, given, 0, end), pieces(text, given, end), caption)


def end_of(text: str) -> Passage:
    """A prompt's end is what a completion answers."""
    if len(text) <= _PROMPT_SHOWN + _WORTH_HIDING:
        return Passage([], pieces(text, ()), [])
    start = len(text) - _PROMPT_SHOWN
    space = text.find(" ", start, start + _WORTH_HIDING)
    start = start if space < 0 else space + 1
    return Passage(pieces(text, (), 0, start), pieces(text, (), start), [])


def pieces(text: str, given: Spans, start: int = 0, end: int | None = None) -> list[Piece]:
    """Characters `start` to `end` of a text, split where given parts begin and end."""
    end = len(text) if end is None else end
    edges = sorted({start, end, *(min(max(edge, start), end) for span in given for edge in span)})
    return [Piece(text[a:b], any(low <= a and b <= high for low, high in given)) for a, b in pairwise(edges)]
