"""FlexAttention under the mask rule, with a block mask that never looks at single scores.

Which tiles of the score matrix hold a visible score follows from prefix bounds and block borders, tile by
tile, so building the mask costs as much as the tiles, not as the scores. The rule itself reads tensors
only: new anchors change values, not code, and nothing is compiled again. Legend: see `geometry.py`;
X queries, Y keys, U query tiles, W key tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ebft_core.geometry import PackedLayout
from ebft_core.masks import visible

TILE = 128
"""Queries and keys of a tile: FlexAttention's own default."""


def flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """FlexAttention of queries `(R, H, X, K)` over keys and values `(R, J, Y, K)`."""
    attention = _compiled() if query.is_cuda else cast("Callable[..., Tensor]", flex_attention)
    grouped = query.shape[1] != key.shape[1]
    return attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)


@cache
def _compiled() -> Callable[..., Tensor]:
    """Uncompiled FlexAttention materialises all scores; one compiled function serves all calls."""
    return cast("Callable[..., Tensor]", torch.compile(flex_attention, dynamic=True))


def block_mask(layout: PackedLayout, first_query: int) -> BlockMask:
    """Block mask of the packed tokens from `first_query` on (0: documents; L: blocks) over all tokens."""
    T = layout.document_RT.shape[1]
    X = T - first_query

    def rule(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # Tiles reach beyond the last token; the index must not.
        inside = (query < X) & (key < T)
        query, key = (query + first_query).clamp(max=T - 1), key.clamp(max=T - 1)
        return inside & visible(layout, row, query, key)

    partial_RUW, full_RUW = tiles(layout, first_query)
    return BlockMask.from_kv_blocks(
        *_listed(partial_RUW), *_listed(full_RUW), BLOCK_SIZE=TILE, mask_mod=rule, seq_lengths=(X, T)
    )


def tiles(layout: PackedLayout, first_query: int) -> tuple[Tensor, Tensor]:
    """Tiles `(R, U, W)` that may hold a visible score, and among them those that hold nothing else.

    A tile may be named needlessly (the rule masks its scores); a visible score lies in a named tile always.
    """
    L, (R, T) = layout.length, layout.document_RT.shape
    U, W = -(-(T - first_query) // TILE), -(-T // TILE)
    device = layout.document_RT.device
    bound_RX = layout.prefix_end_RT[:, first_query:]
    padding = (0, U * TILE - bound_RX.shape[1])
    highest_RU1 = torch.nn.functional.pad(bound_RX, padding).view(R, U, TILE).amax(-1, keepdim=True)
    lowest_RU1 = torch.nn.functional.pad(bound_RX, padding).view(R, U, TILE).amin(-1, keepdim=True)
    start_W = torch.arange(W, device=device) * TILE
    in_prefix = (start_W < L) & (start_W < highest_RU1)
    # Inside packed rows a prefix is cut at the document's start: no tile is taken for whole there.
    whole = (start_W + TILE <= lowest_RU1) & (start_W + TILE <= L)
    full_RUW = whole & (not layout.document_masking)
    first_U1 = first_query + torch.arange(U, device=device)[:, None] * TILE
    last_U1 = (first_U1 + TILE - 1).clamp(max=T - 1)
    # The block of a tile's first query may have begun in an earlier tile.
    begin_U1 = first_U1 - (first_U1 - L).clamp(min=0) % max(1, layout.block_length)
    own = (start_W + TILE > torch.maximum(begin_U1, torch.tensor(L, device=device))) & (start_W <= last_U1)
    return (in_prefix | own) & ~full_RUW, full_RUW


def _listed(tiles_RUW: Tensor) -> tuple[Tensor, Tensor]:
    """Number of tiles per query tile, and their key tiles first in the list, with a head axis."""
    count_RU = tiles_RUW.sum(dim=-1, dtype=torch.int32)
    order_RUW = tiles_RUW.int().argsort(dim=-1, descending=True, stable=True).int()
    return count_RU[:, None], order_RUW[:, None].contiguous()
