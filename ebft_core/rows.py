"""From dataset rows to the tensors of a micro-batch: padding, anchors, random numbers.

Legend: see `geometry.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ebft_core.config import RunConfig
from ebft_core.geometry import NO_ANCHOR, place_anchors
from ebft_core.logprobs import IGNORE


@dataclass(frozen=True)
class RowBatch:
    """Rows of one micro-batch.

    Attributes:
        input_ids_RL: int64, padded at the end.
        labels_RL: int64, -100 = not supervised.
        document_ids_RL: document of each token, -1 = padding; None when every row is one document.
        anchors_RA: int64, -1 = none.
        row_ids_R: the rows' numbers in their dataset (seeds of their random numbers).
        is_target_RL: tokens the policy itself would write; None: all of them (as far as pooling goes).
        target_length_RA: tokens of each anchor's ground truth; None: as many as are generated.
    """

    input_ids_RL: Tensor
    labels_RL: Tensor
    document_ids_RL: Tensor | None
    anchors_RA: Tensor
    row_ids_R: Tensor
    is_target_RL: Tensor | None = None
    target_length_RA: Tensor | None = None

    def to(self, device: torch.device) -> RowBatch:
        """The same batch on another device (the row numbers stay on the CPU)."""
        moved: dict[str, Any] = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and name != "row_ids_R"
        }
        return replace(self, **moved)

    @property
    def num_groups(self) -> int:
        """Anchors of the batch."""
        return int((self.anchors_RA != NO_ANCHOR).sum())


def row_anchors(row: Mapping[str, Any], config: RunConfig) -> Tensor:
    """Anchors of one dataset row, `anchors_A` int64.

    With `document_masking` every packed document gets anchors of its own, so no target crosses a
    boundary; without it the row is one document. A target that touches a token that is no target
    (a user's turn in a chat) is left out.
    """
    ebft = config.ebft
    if ebft.mode == "structured":  # one anchor, behind the prompt
        return torch.as_tensor(row["prompt_lengths"][:1], dtype=torch.int64)
    lengths, prompts = list(row["document_lengths"]), list(row["prompt_lengths"])
    if not ebft.document_masking:
        lengths, prompts = [sum(lengths)], prompts[:1]
    start, anchors = 0, []
    for length, prompt_length in zip(lengths, prompts, strict=True):
        placed = place_anchors(
            length,
            stride=ebft.stride,
            context_length=ebft.context_length,
            generate_max_len=ebft.generate_max_len,
            prompt_length=prompt_length,
            min_completion_prefix=ebft.min_completion_prefix,
        )
        anchors.append(placed + start)
        start += length
    anchors_A = torch.cat(anchors)
    not_target = (~torch.as_tensor(row["is_target"], dtype=torch.bool)).long().cumsum(0)
    before = torch.cat([torch.zeros(1, dtype=torch.int64), not_target])
    clean = before[anchors_A + ebft.generate_max_len] == before[anchors_A]
    return anchors_A[clean]


def collate_rows(
    rows: Sequence[Mapping[str, Any]],
    config: RunConfig,
    pad_token_id: int,
    row_ids: Sequence[int] | None = None,
) -> RowBatch:
    """Rows of the tokenized dataset as one padded micro-batch.

    Args:
        rows: columns `input_ids, labels, is_target, document_lengths, prompt_lengths` (and `row_id`).
        row_ids: numbers of the rows; None: their column `row_id`.
    """
    ids = [int(row["row_id"]) for row in rows] if row_ids is None else list(row_ids)
    anchors = [row_anchors(row, config) for row in rows]
    several = config.ebft.document_masking and any(len(row["document_lengths"]) > 1 for row in rows)
    documents = [
        torch.repeat_interleave(torch.as_tensor(row["document_lengths"], dtype=torch.int64)) for row in rows
    ]
    batch = RowBatch(
        input_ids_RL=_pad(
            [torch.as_tensor(row["input_ids"], dtype=torch.int64) for row in rows], pad_token_id
        ),
        labels_RL=_pad([torch.as_tensor(row["labels"], dtype=torch.int64) for row in rows], IGNORE),
        document_ids_RL=_pad(documents, -1) if several else None,
        anchors_RA=_pad(anchors, NO_ANCHOR),
        row_ids_R=torch.tensor(ids, dtype=torch.int64),
    )
    return _with_targets(batch, rows) if config.ebft.mode == "structured" else batch


def _with_targets(batch: RowBatch, rows: Sequence[Mapping[str, Any]]) -> RowBatch:
    """Ground truths of structured rows: everything behind the prompt, user turns marked."""
    written = [torch.as_tensor(row["is_target"], dtype=torch.bool) for row in rows]
    lengths = [int(row["document_lengths"][0]) - int(row["prompt_lengths"][0]) for row in rows]
    target_length_RA = torch.tensor(lengths, dtype=torch.int64)[:, None]
    return replace(batch, is_target_RL=_pad(written, False), target_length_RA=target_length_RA)


def _pad(sequences: Sequence[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True, padding_value=value)


def row_uniforms(
    row_ids: Sequence[int] | Tensor, *, seed: int, step: int, shape: tuple[int, int, int]
) -> Tensor:
    """Random numbers `uniforms_RANG` in [0, 1) that depend on (seed, step, row) and on nothing else.

    So a rollout is the same however rows are batched, ordered or padded, and after a resume.

    Args:
        shape: (A, N, G).
    """
    rows = []
    for row_id in row_ids:
        generator = torch.Generator().manual_seed(mix_seed(seed, step, int(row_id)))
        rows.append(torch.rand(shape, generator=generator))
    return torch.stack(rows)


def mix_seed(*numbers: int) -> int:
    """A 63-bit seed from several numbers (SplitMix64 finaliser applied to each in turn)."""
    state = 0
    for number in numbers:
        state = (state + 0x9E3779B97F4A7C15 + number) % 2**64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
        state ^= state >> 31
    return state >> 1
