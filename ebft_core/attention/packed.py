"""Attention of the packed, differentiable forward.

Two backends behind one class, chosen once:

* `sdpa`: chunks of neighbouring anchors (`chunks.py`), on the CPU with the least work and memory (`cpu.py`),
  elsewhere through the public scaled dot-product attention.
* `flex`: FlexAttention with a BlockMask built from the same rule (CUDA; it has no backward on CPU).

Legend: see `geometry.py`; J key/value heads, K head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from ebft_core.attention.chunks import Chunk, ChunkPlan, additive, make_plan
from ebft_core.attention.cpu import packed_attention
from ebft_core.geometry import PackedLayout
from ebft_core.masks import dense_mask, mask_mod

Backend = Literal["sdpa", "flex"]


class PackedAttention:
    """The attention plan of one packed batch; masks are made once and shared by all layers."""

    def __init__(self, layout: PackedLayout, backend: Backend) -> None:
        self.layout = layout
        self.backend = backend
        self._plans: dict[torch.dtype, ChunkPlan] = {}

    def attend(
        self, layer: int, query_RHTK: Tensor, key_RJTK: Tensor, value_RJTK: Tensor, scale: float
    ) -> Tensor:
        """Attention output `(R, H, T, K)` under the mask rule."""
        del layer
        if self.backend == "flex":
            return self._flex(query_RHTK, key_RJTK, value_RJTK, scale)
        return self._sdpa(query_RHTK, key_RJTK, value_RJTK, scale)

    def _flex(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        attention = _compiled_flex() if query.is_cuda else cast("Callable[..., Tensor]", flex_attention)
        return attention(
            query,
            key,
            value,
            block_mask=self._block_mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        plan = self._chunk_plan(query.dtype)
        if query.device.type == "cpu":
            return packed_attention(query, key, value, plan, scale)
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        L, mask = plan.length, plan.document_mask
        document = (query[:, :, :L], key[:, :, :L], value[:, :, :L])
        outputs = [
            scaled_dot_product_attention(*document, attn_mask=mask, is_causal=mask is None, scale=scale)
        ]
        for chunk in plan.chunks:
            own = slice(chunk.start, chunk.stop)
            keys = torch.cat([key[:, :, : chunk.prefix], key[:, :, own]], dim=2)
            values = torch.cat([value[:, :, : chunk.prefix], value[:, :, own]], dim=2)
            mask = torch.cat([chunk.mask_R1XP, self._own_mask(chunk, query.dtype)], dim=-1)
            outputs.append(
                scaled_dot_product_attention(query[:, :, own], keys, values, attn_mask=mask, scale=scale)
            )
        return torch.cat(outputs, dim=2)

    def _chunk_plan(self, dtype: torch.dtype) -> ChunkPlan:
        if dtype not in self._plans:
            self._plans[dtype] = make_plan(self.layout, dtype)
        return self._plans[dtype]

    def _own_mask(self, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        """Mask among the chunk's own tokens, alike in all rows."""
        own = torch.arange(chunk.start, chunk.stop, device=self.layout.block_T.device)
        mask = additive(dense_mask(self.layout, own, own)[:1], dtype)
        return mask.expand(chunk.mask_R1XP.shape[0], -1, -1, -1)

    @cached_property
    def _block_mask(self) -> BlockMask:
        R, T = self.layout.document_RT.shape
        return create_block_mask(
            mask_mod(self.layout), R, None, T, T, device=self.layout.document_RT.device.type, _compile=False
        )


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    """Uncompiled FlexAttention materialises all scores; one compiled function serves all calls."""
    return cast("Callable[..., Tensor]", torch.compile(flex_attention, dynamic=True))
