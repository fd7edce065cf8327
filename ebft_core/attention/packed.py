"""Attention of the packed, differentiable forward, in two phases.

`DocumentAttention` runs the documents alone and keeps each layer's keys and values. `BlockAttention` runs
blocks against them: any part of the blocks, as often as needed, so memory is bounded by the part.
Two backends behind both, chosen once:

* `sdpa`: chunks of neighbouring anchors (`chunks.py`), on the CPU with the least work and memory (`cpu.py`),
  elsewhere through the public scaled dot-product attention.
* `flex`: FlexAttention with a BlockMask built from the same rule (`flex.py`; it has no backward on CPU).

Legend: see `geometry.py`; J key/value heads, K head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention

from ebft_core.attention.chunks import Chunk, ChunkPlan, additive, make_plan
from ebft_core.attention.cpu import packed_attention
from ebft_core.attention.flex import block_mask, flex
from ebft_core.geometry import PackedLayout
from ebft_core.masks import dense_mask

Backend = Literal["sdpa", "flex"]


@dataclass
class KeyValues:
    """Keys and values of the documents, by layer, `(R, J, L, K)`."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)


class DocumentAttention:
    """Attention plan of a forward over documents only; fills `kept` for the blocks that follow."""

    def __init__(self, layout: PackedLayout, backend: Backend) -> None:
        if layout.num_blocks:
            raise ValueError("the layout of the document phase has no blocks")
        self.layout = layout
        self.backend = backend
        self.kept = KeyValues()
        self._plan: ChunkPlan | None = None

    def attend(
        self, layer: int, query_RHLK: Tensor, key_RJLK: Tensor, value_RJLK: Tensor, scale: float
    ) -> Tensor:
        """Attention output `(R, H, L, K)`: causal within each document."""
        # Gradient checkpointing calls a layer again in the backward pass; the first call's tensors count.
        self.kept.keys.setdefault(layer, key_RJLK)
        self.kept.values.setdefault(layer, value_RJLK)
        if self.backend == "flex":
            return flex(query_RHLK, key_RJLK, value_RJLK, self._block_mask, scale)
        plan = self._plan = self._plan or make_plan(self.layout, query_RHLK.dtype)
        if query_RHLK.device.type == "cpu":
            return packed_attention(query_RHLK, key_RJLK, value_RJLK, plan, scale)
        key_RHLK, value_RHLK = _repeat(query_RHLK, key_RJLK, value_RJLK)
        mask = plan.document_mask
        return scaled_dot_product_attention(
            query_RHLK, key_RHLK, value_RHLK, attn_mask=mask, is_causal=mask is None, scale=scale
        )

    @cached_property
    def _block_mask(self) -> BlockMask:
        return block_mask(self.layout, 0)


class BlockAttention:
    """Attention plan of a forward over blocks, whose documents have been run already."""

    def __init__(self, layout: PackedLayout, backend: Backend, documents: KeyValues) -> None:
        self.layout = layout
        self.backend = backend
        self.documents = documents
        self._plan: ChunkPlan | None = None

    def attend(
        self, layer: int, query_RHXK: Tensor, key_RJXK: Tensor, value_RJXK: Tensor, scale: float
    ) -> Tensor:
        """Attention output `(R, H, X, K)` of the blocks' X tokens."""
        key = torch.cat([self.documents.keys[layer], key_RJXK], dim=2)
        value = torch.cat([self.documents.values[layer], value_RJXK], dim=2)
        if self.backend == "flex":
            return flex(query_RHXK, key, value, self._block_mask, scale)
        folds = query_RHXK.device.type == "cpu"
        groups = query_RHXK.shape[1] // key.shape[1] if folds else 1
        plan = self._plan = self._plan or make_plan(self.layout, query_RHXK.dtype, groups)
        if folds:
            return packed_attention(query_RHXK, key, value, plan, scale)
        return self._chunked(plan, query_RHXK, *_repeat(query_RHXK, key, value), scale)

    def _chunked(self, plan: ChunkPlan, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        L, outputs = self.layout.length, []
        for chunk in plan.chunks:
            own = slice(chunk.start, chunk.stop)
            keys = torch.cat([key[:, :, : chunk.prefix], key[:, :, own]], dim=2)
            values = torch.cat([value[:, :, : chunk.prefix], value[:, :, own]], dim=2)
            own_mask = self._own_mask(chunk, query.dtype).expand(chunk.mask_R1XP.shape[0], -1, -1, -1)
            mask = torch.cat([chunk.mask_R1XP, own_mask], dim=-1)
            queries = query[:, :, chunk.start - L : chunk.stop - L]
            outputs.append(scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale))
        return torch.cat(outputs, dim=2)

    def _own_mask(self, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        """Mask among the chunk's own tokens, alike in all rows."""
        own = torch.arange(chunk.start, chunk.stop, device=self.layout.block_T.device)
        return additive(dense_mask(self.layout, own, own)[:1], dtype)

    @cached_property
    def _block_mask(self) -> BlockMask:
        return block_mask(self.layout, self.layout.length)


def _repeat(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with as many heads as the queries."""
    groups = query.shape[1] // key.shape[1]
    return (
        (key, value)
        if groups == 1
        else (key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1))
    )
