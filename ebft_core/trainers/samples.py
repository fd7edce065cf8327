"""A look at what the policy writes while it is trained: now and then one group of rollouts as text.

Legend: see `geometry.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ebft_core.events import EventWriter
from ebft_core.rows import RowBatch
from ebft_core.trainers.step import ScoredRollout

CONTEXT_TOKENS = 48
"""Tokens shown before an anchor."""


class RolloutSamples:
    """Sends the best and the worst rollout of a group to the journal, for people to read.

    Args:
        events: takes an event `samples` with rows of `context`, `ground_truth`, `sample` and `reward`, and
            `columns` where a user's rewards filled some.
        tokenizer: decodes.
        every: optimiser steps between two looks.
    """

    def __init__(self, events: EventWriter, tokenizer: Any, every: int) -> None:
        self._events = events
        self._tokenizer = tokenizer
        self._every = every
        self._last_step = 0

    def look(
        self,
        step: int,
        batch: RowBatch,
        scored: ScoredRollout,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        """Show one usable group of a micro-batch, if `step` (from 1) is due and was not shown yet.

        Args:
            columns: further things to show, R·A·N entries each in the order of the samples.
        """
        if step % self._every or step == self._last_step or not bool(scored.valid_RA.any()):
            return
        self._last_step = step
        groups = scored.valid_RA.nonzero().tolist()
        row, anchor = groups[step % len(groups)]  # not always the first of a row
        reward_N = scored.reward_RAN[row, anchor]
        chosen = dict.fromkeys((int(reward_N.argmax()), int(reward_N.argmin())))
        context, ground_truth = self._surroundings(batch, row, anchor, scored.blocks.tokens_RANG.shape[-1])
        self._events.samples(
            step,
            [
                {
                    "context": context,
                    "ground_truth": ground_truth,
                    "sample": self._block(scored, row, anchor, sample),
                    "reward": round(float(reward_N[sample]), 4),
                    **_entries(
                        columns, int(scored.reward_RAN[:row].numel()) + anchor * len(reward_N) + sample
                    ),
                }
                for sample in chosen
            ],
        )

    def _surroundings(self, batch: RowBatch, row: int, anchor: int, block_length: int) -> tuple[str, str]:
        """What stands before the anchor inside its document, and what follows there."""
        ids_L = batch.input_ids_RL[row]
        place = int(batch.anchors_RA[row, anchor])
        same_L = torch.ones_like(ids_L, dtype=torch.bool)
        if batch.document_ids_RL is not None:
            same_L = batch.document_ids_RL[row] == batch.document_ids_RL[row, place - 1]
        length = block_length
        if batch.target_length_RA is not None:
            length = int(batch.target_length_RA[row, anchor])
        before = slice(max(0, place - CONTEXT_TOKENS), place)
        after = slice(place, place + length)
        return self._text(ids_L[before][same_L[before]]), self._text(ids_L[after][same_L[after]])

    def _block(self, scored: ScoredRollout, row: int, anchor: int, sample: int) -> str:
        length = int(scored.blocks.length_RAN[row, anchor, sample])
        return self._text(scored.blocks.tokens_RANG[row, anchor, sample, :length])

    def _text(self, ids: torch.Tensor) -> str:
        return str(self._tokenizer.decode(ids.tolist()))


def _entries(columns: Mapping[str, Sequence[Any]] | None, index: int) -> dict[str, dict[str, str]]:
    """The columns' entries of one sample, as text."""
    return {"columns": {name: str(values[index]) for name, values in columns.items()}} if columns else {}
