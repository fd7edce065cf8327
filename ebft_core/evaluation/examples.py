"""Rollouts for people to read: what stands before an anchor, what follows, and what both models wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from ebft_core.evaluation.records import BlockRecord, Measurements
from ebft_core.evaluation.summary import CompletionNote, RolloutExample, Spans

CONTEXT_TOKENS = 48
"""Tokens shown before an anchor inside a document. A prompt is shown whole."""

Row = Mapping[str, Any]


def make_examples(
    rows: Sequence[Row], base: Measurements, tuned: Measurements, count: int, tokenizer: Any
) -> list[RolloutExample]:
    """`count` anchors, evenly spread over everything that was measured."""
    by_id = {int(row["row_id"]): row for row in rows}
    total = len(base.blocks)
    numbers = sorted({int((i + 0.5) * total / count) for i in range(count)}) if count else []
    return [
        _example(by_id[base.blocks[i].row_id], base.blocks[i], tuned.blocks[i], tokenizer) for i in numbers
    ]


def _example(row: Row, old: BlockRecord, new: BlockRecord, tokenizer: Any) -> RolloutExample:
    ids = row["input_ids"]
    if old.truncated is None:
        start = max(document_at(row, old.anchor - 1)[1], old.anchor - CONTEXT_TOKENS)
        end = old.anchor + len(old.tokens[0])
    else:
        start, end = 0, int(row["document_lengths"][0])
    truth = slice(old.anchor, end)
    return RolloutExample(
        row_id=old.row_id,
        document=old.document,
        anchor=old.anchor,
        context=tokenizer.decode(ids[start : old.anchor]),
        ground_truth=tokenizer.decode(ids[truth]),
        base_samples=tuple(tokenizer.decode(list(block)) for block in old.tokens),
        tuned_samples=tuple(tokenizer.decode(list(block)) for block in new.tokens),
        base_alignments=old.alignments,
        tuned_alignments=new.alignments,
        ground_truth_given=given_spans(tokenizer, ids[truth], row["is_target"][truth]),
        base_notes=_notes(old, tokenizer),
        tuned_notes=_notes(new, tokenizer),
    )


def _notes(block: BlockRecord, tokenizer: Any) -> tuple[CompletionNote, ...]:
    if block.truncated is None:
        return ()
    samples = zip(block.tokens, block.written, block.truncated, strict=True)
    return tuple(
        CompletionNote(sum(written), truncated, given_spans(tokenizer, tokens, written))
        for tokens, written, truncated in samples
    )


def given_spans(tokenizer: Any, ids: Sequence[int], written: Sequence[bool]) -> Spans:
    """Where, in the characters of the decoded text, the tokens stand that no model wrote."""
    spans, place = [], 0
    for by_model, run in groupby(written):
        start, place = place, place + len(list(run))
        if not by_model:
            # The ends of whole prefixes: a piece decoded alone may lose the space it begins with.
            spans.append((len(tokenizer.decode(ids[:start])), len(tokenizer.decode(ids[:place]))))
    return tuple(spans)


def document_at(row: Row, position: int) -> tuple[str, int]:
    """Hash and first token of the document that holds token `position` of a row."""
    start = 0
    for length, document in zip(row["document_lengths"], row["document_hashes"], strict=True):
        if position < start + length:
            return str(document), start
        start += length
    raise IndexError(f"token {position} lies outside a row of {start} tokens")
