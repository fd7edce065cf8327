"""How the hidden states of a block become one vector.

A rule names the tokens to read, so that nothing else is gathered: it maps the blocks' lengths `(*,)` and
actions `(*, G)` to offsets inside the block `(*, P)` and weights `(*, P)`. Without weights the P states
stand side by side.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CONCAT_FRACTIONS = (0.25, 0.5, 0.75)
"""Positions that `concat` reads, as fractions of the block's length."""

PoolingRule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


def _last_token(length: Tensor, action: Tensor) -> tuple[Tensor, None]:
    del action
    return (length - 1).clamp(min=0)[..., None], None


def _concat(length: Tensor, action: Tensor) -> tuple[Tensor, None]:
    del action
    offsets = [torch.minimum((fraction * length).long(), length - 1) for fraction in CONCAT_FRACTIONS]
    return torch.stack(offsets, dim=-1).clamp(min=0), None


def _mean(length: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    return _weighted(torch.arange(action.shape[-1], device=action.device) < length[..., None])


def _mean_of_actions(length: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    inside = torch.arange(action.shape[-1], device=action.device) < length[..., None]
    return _weighted(action & inside)


def _weighted(used: Tensor) -> tuple[Tensor, Tensor]:
    offsets = torch.arange(used.shape[-1], device=used.device).expand_as(used)
    return offsets, used.float() / used.sum(dim=-1, keepdim=True).clamp(min=1)


POOLING: dict[str, PoolingRule] = {
    "last_token": _last_token,
    "mean_pooling": _mean,
    "completion_mean": _mean_of_actions,
    "concat": _concat,
}
