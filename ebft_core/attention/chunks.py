"""Cuts the generated queries of packed rows into chunks of neighbouring anchors.

One dense T × T attention would cost more than the document copies it replaces. A chunk looks at the
document up to its last anchor and at its own blocks only, so the scores that are computed are close to
the scores that are needed. Legend: see `geometry.py`; X queries of a chunk, P tokens of its prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ebft_core.geometry import NO_ANCHOR, PackedLayout, pack_layout
from ebft_core.masks import dense_mask

CHUNK_QUERIES = 256
"""Generated queries per kernel call: few enough to skip most masked scores, many enough for full kernels."""


@dataclass(frozen=True)
class Chunk:
    """Packed tokens `start:stop`, the prefix length they look at, and the prefix's additive mask.

    The mask is repeated for the query heads that share a key where `make_plan` was told to: X·Q queries.
    """

    start: int
    stop: int
    prefix: int
    mask_R1XP: Tensor


@dataclass(frozen=True)
class ChunkPlan:
    """What all layers of one forward share."""

    length: int
    block_length: int
    document_mask: Tensor | None
    chunks: list[Chunk]


def make_plan(layout: PackedLayout, dtype: torch.dtype, groups: int = 1) -> ChunkPlan:
    """Masks and chunk borders of a packed batch; masks are additive, in the dtype of the queries.

    Args:
        groups: query heads that share a key and are folded into the query axis.
    """
    layout = _common_rows(layout)
    L, S = layout.length, layout.block_length
    device = layout.anchors_RA.device
    index_L = torch.arange(L, device=device)
    document_mask = additive(dense_mask(layout, index_L, index_L), dtype) if layout.document_masking else None
    tokens_per_anchor = layout.n_samples * S
    A = layout.anchors_RA.shape[1] if tokens_per_anchor else 0
    per_chunk = max(1, CHUNK_QUERIES // max(1, tokens_per_anchor))
    last_A = layout.anchors_RA.amax(dim=0).cummax(dim=0).values.tolist() if A else []
    chunks = []
    for first in range(0, A, per_chunk):
        after = min(A, first + per_chunk)
        start, stop = L + first * tokens_per_anchor, L + after * tokens_per_anchor
        prefix = max(1, int(last_A[after - 1]))
        queries = torch.arange(start, stop, device=device)
        mask = dense_mask(layout, queries, torch.arange(prefix, device=device))
        chunks.append(Chunk(start, stop, prefix, additive(mask, dtype).repeat(1, 1, groups, 1)))
    return ChunkPlan(L, S, document_mask, chunks)


def _common_rows(layout: PackedLayout) -> PackedLayout:
    """One row that stands for all, where rows differ only in how many of the same anchors they have."""
    anchors_A = (
        layout.anchors_RA.amax(dim=0, keepdim=True) if layout.anchors_RA.numel() else layout.anchors_RA
    )
    same = (layout.anchors_RA == anchors_A) | (layout.anchors_RA == NO_ANCHOR)
    if layout.document_masking or not bool(same.all()):
        return layout
    return pack_layout(anchors_A[:1], layout.n_samples, layout.block_length, layout.length)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as numbers to add to the scores: 0 or -inf."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, float("-inf")
    )
