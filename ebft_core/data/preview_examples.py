"""A structured example as `ebft preview` shows it: prompt, turns, and what is given between them."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
from rich.console import Group
from rich.rule import Rule
from rich.text import Text

from ebft_core.data.document import IGNORE
from ebft_core.data.packing import Row
from ebft_core.data.preview_text import ANCHOR, CONTEXT, GIVEN, SUPERVISED, TARGET_ONLY, visible
from ebft_core.tokenizer import Tokenizer


def example_facts(row: Row, stop_ids: list[int]) -> str:
    """Lengths in tokens, number of turns, and whether the ground truth ends as a turn does."""
    prompt = row.prompt_lengths[0]
    written = int(row.is_target.sum())
    turns = sum(is_written for _, _, is_written in _stretches(row))
    facts = [
        f"{len(row)} tokens",
        f"prompt {prompt}",
        f"ground truth {written} in {turns} turn(s)",
        f"{int((row.labels != IGNORE).sum())} supervised",
    ]
    if given := len(row) - prompt - written:
        facts.append(f"{given} given between turns")
    if int(row.input_ids[-1]) not in stop_ids:
        facts.append("truncated, or without an end")
    if row.extra is not None:
        facts.append(f"columns for rewards: {', '.join(json.loads(row.extra)) or 'none'}")
    return " · ".join(facts)


def show_example(row: Row, tokenizer: Tokenizer) -> Group:
    """The decoded example, one heading per stretch; supervised tokens green, other targets yellow."""
    shown: list[Rule | Text] = []
    turn = 0
    for start, stop, written in _stretches(row):
        turn += written
        what = "prompt" if start == 0 else f"ground truth, turn {turn}" if written else "given, not written"
        shown.append(Rule(what, align="left", style="dim"))
        text = Text()
        if written and turn == 1:
            text.append_text(ANCHOR)
        for begin, end in _label_runs(row, start, stop):
            words = visible(tokenizer.decode(row.input_ids[begin:end].tolist()))
            text.append(words, style=_style(row, begin))
        shown.append(text)
    return Group(*shown)


def _stretches(row: Row) -> list[tuple[int, int, bool]]:
    """(first token, end, written by the policy): the prompt, a turn, what is given, a turn, …"""
    changes = np.flatnonzero(row.is_target[1:] != row.is_target[:-1]) + 1
    borders = [0, *changes.tolist(), len(row)]
    return [(start, stop, bool(row.is_target[start])) for start, stop in pairwise(borders)]


def _label_runs(row: Row, start: int, stop: int) -> list[tuple[int, int]]:
    labelled = row.labels[start:stop] != IGNORE
    changes = np.flatnonzero(labelled[1:] != labelled[:-1]) + 1 + start
    return list(pairwise([start, *changes.tolist(), stop]))


def _style(row: Row, token: int) -> str:
    if not row.is_target[token]:
        return CONTEXT if token < row.prompt_lengths[0] else GIVEN
    return SUPERVISED if row.labels[token] != IGNORE else TARGET_ONLY
