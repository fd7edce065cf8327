"""THE mask rule of packed rows, and its two views.

* Document token i sees the tokens of its own document up to and including i.
* Generated token (b, j, s) sees the tokens of the anchor's document before a_b, and the tokens
  (b, j, s' <= s) of its own block. Nothing else.

`visible` is that rule on index tensors. `dense_mask` evaluates it on a grid, `mask_mod` hands it to
FlexAttention. There is no second place where the rule is written. Legend: see `geometry.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ebft_core.geometry import PackedLayout


def visible(layout: PackedLayout, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Whether packed token `query` of row `row` may attend to packed token `key`.

    The three index tensors broadcast against each other; the result is boolean.
    """
    same_document = layout.document_RT[row, query] == layout.document_RT[row, key]
    prefix = (key < layout.length) & (key < layout.prefix_end_RT[row, query]) & same_document
    same_block = (layout.block_T[query] == layout.block_T[key]) & (layout.block_T[key] >= 0)
    return prefix | (same_block & (key <= query))


def dense_mask(layout: PackedLayout, query_X: Tensor | None = None, key_Y: Tensor | None = None) -> Tensor:
    """The rule as a boolean tensor `(R, 1, X, Y)`, ready for scaled dot-product attention.

    Args:
        query_X, key_Y: packed indices to evaluate it on; None: all T tokens.
    """
    R, T = layout.document_RT.shape
    device = layout.document_RT.device
    everything = torch.arange(T, device=device)
    query_X = everything if query_X is None else query_X
    key_Y = everything if key_Y is None else key_Y
    rows = torch.arange(R, device=device)[:, None, None]
    return visible(layout, rows, query_X[None, :, None], key_Y[None, None, :])[:, None]


def mask_mod(layout: PackedLayout) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule in the form FlexAttention wants: `(row, head, query, key) -> bool`."""

    def rule(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible(layout, row, query, key)

    return rule
