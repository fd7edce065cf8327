"""Attention of the packed, differentiable forward.

Two backends behind one class, chosen once:

* `sdpa`: dense attention over T × T would cost more than the copies it replaces, so generated
  queries are cut into chunks of neighbouring anchors. A chunk attends to the document up to its last
  anchor and to its own blocks; with chunks of about `CHUNK_QUERIES` queries the scores computed are
  close to the scores needed.
* `flex`: FlexAttention with a BlockMask built from the same rule (CUDA; it has no backward on CPU).

Legend: see `geometry.py`; J key/value heads, K head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from ebft_core.geometry import PackedLayout
from ebft_core.masks import dense_mask, mask_mod

Backend = Literal["sdpa", "flex"]

CHUNK_QUERIES = 256
"""Generated queries per SDPA call: small enough to skip most masked scores, large enough for full kernels."""


@dataclass(frozen=True)
class _Chunk:
    """Queries `start:stop` of the packed row, the document prefix they need, and their mask."""

    start: int
    stop: int
    prefix: int
    mask: Tensor


class PackedAttention:
    """The attention plan of one packed batch; masks are made once and shared by all layers."""

    def __init__(self, layout: PackedLayout, backend: Backend) -> None:
        self.layout = layout
        self.backend = backend

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
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        L = self.layout.length
        document = scaled_dot_product_attention(
            query[:, :, :L],
            key[:, :, :L],
            value[:, :, :L],
            attn_mask=self._document_mask,
            is_causal=self._document_mask is None,
            scale=scale,
        )
        outputs = [document]
        for chunk in self._chunks:
            own = slice(chunk.start, chunk.stop)
            keys = torch.cat([key[:, :, : chunk.prefix], key[:, :, own]], dim=2)
            values = torch.cat([value[:, :, : chunk.prefix], value[:, :, own]], dim=2)
            outputs.append(
                scaled_dot_product_attention(
                    query[:, :, own], keys, values, attn_mask=chunk.mask, scale=scale
                )
            )
        return torch.cat(outputs, dim=2)

    @cached_property
    def _document_mask(self) -> Tensor | None:
        """None where plain causal attention is the rule: one document per row."""
        if not self.layout.document_masking:
            return None
        index_L = torch.arange(self.layout.length, device=self.layout.document_RT.device)
        return dense_mask(self.layout, index_L, index_L)

    @cached_property
    def _chunks(self) -> list[_Chunk]:
        layout = self.layout
        device = layout.document_RT.device
        tokens_per_anchor = layout.n_samples * layout.block_length
        A = layout.anchors_RA.shape[1]
        anchors_per_chunk = max(1, CHUNK_QUERIES // max(1, tokens_per_anchor))
        last_A = layout.anchors_RA.amax(dim=0).cummax(dim=0).values.tolist() if A else []
        chunks = []
        for first in range(0, A if tokens_per_anchor else 0, anchors_per_chunk):
            after = min(A, first + anchors_per_chunk)
            start, stop = (layout.length + b * tokens_per_anchor for b in (first, after))
            prefix = max(0, int(last_A[after - 1]))
            own = torch.arange(start, stop, device=device)
            keys = torch.cat([torch.arange(prefix, device=device), own])
            chunks.append(_Chunk(start, stop, prefix, dense_mask(layout, own, keys)))
        return chunks

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
