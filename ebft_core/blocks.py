"""Generated blocks: the record both samplers fill, and how blocks are chosen for a forward pass.

A block need not be computed to be used: samples of a group with equal tokens have equal hidden states,
so one of them stands for all, and blocks without a learning signal are left out. What remains is a
flat list per row, in which every block carries its own anchor. Legend: see `geometry.py`; B = A·N
blocks of a row, X chosen ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ebft_core.geometry import NO_ANCHOR


@dataclass(frozen=True)
class Blocks:
    """What a sampler generated at the anchors of a micro-batch.

    Attributes:
        tokens_RANG: int64; anything behind a block's length, and at anchors that are -1.
        length_RAN: real tokens of each block, int64; 0 where generation failed.
        action_RANG: tokens the policy chose: not the padding, not a user's turn inside the block.
        sampler_logprob_RANG: log-probabilities the sampler reported, float32, 0 elsewhere; None: the
            sampler is the policy itself.
        truncated_RAN: blocks that met their length bound before they ended.
        weight_version: optimiser steps behind the weights they were sampled from.
    """

    tokens_RANG: Tensor
    length_RAN: Tensor
    action_RANG: Tensor
    sampler_logprob_RANG: Tensor | None = None
    truncated_RAN: Tensor | None = None
    weight_version: int = 0

    @classmethod
    def full(cls, tokens_RANG: Tensor, anchors_RA: Tensor) -> Blocks:
        """Blocks of strided mode: every token at a real anchor is an action."""
        *_, G = tokens_RANG.shape
        valid_RA11 = (anchors_RA != NO_ANCHOR)[:, :, None, None]
        length_RAN = torch.full_like(tokens_RANG[..., 0], G)
        return cls(tokens_RANG, length_RAN, valid_RA11.expand_as(tokens_RANG))

    @property
    def action_count(self) -> int:
        """Action tokens of the micro-batch."""
        return int(self.action_RANG.sum())

    def to(self, device: torch.device) -> Blocks:
        """The same blocks on another device."""
        moved: dict[str, Any] = {n: x.to(device) for n, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True)
class BlockChoice:
    """The chosen blocks of every row, and where each block of the batch finds its result.

    Attributes:
        index_RX: number b·N + j of each chosen block, longest first, else in the order of the row; 0 where
            `valid_RX` is False.
        valid_RX: False pads rows with fewer chosen blocks.
        position_RB: for every block of the batch, the place of its stand-in in `index_RX`.
        computed_RB: whether it has one.
    """

    index_RX: Tensor
    valid_RX: Tensor
    position_RB: Tensor
    computed_RB: Tensor

    def pick(self, value_RAN: Tensor) -> Tensor:
        """Per-block values `(R, A, N, …)` of the chosen blocks, `(R, X, …)`."""
        flat_RB = value_RAN.flatten(1, 2)
        rows_R1 = torch.arange(flat_RB.shape[0], device=flat_RB.device)[:, None]
        return flat_RB[rows_R1, self.index_RX]

    def pick_anchors(self, anchors_RA: Tensor, n_samples: int) -> Tensor:
        """Anchors `anchors_RX` of the chosen blocks, -1 as padding."""
        anchors_RX = anchors_RA.gather(1, self.index_RX // n_samples)
        return anchors_RX.masked_fill(~self.valid_RX, NO_ANCHOR)

    def spread(self, value_RX: Tensor, n_samples: int) -> Tensor:
        """Results `(R, X, …)` of the chosen blocks handed to all blocks, `(R, A, N, …)`."""
        rows_R1 = torch.arange(value_RX.shape[0], device=value_RX.device)[:, None]
        spread_RB = value_RX[rows_R1, self.position_RB]
        computed_RB = self.computed_RB.view(*self.computed_RB.shape, *[1] * (value_RX.dim() - 2))
        return torch.where(computed_RB, spread_RB, 0.0).unflatten(1, (-1, n_samples))

    def sum(self, value_RAN: Tensor) -> Tensor:
        """Per-block values `(R, A, N, …)` added up over the blocks a chosen one stands for, `(R, X, …)`."""
        flat_RB = value_RAN.flatten(1, 2)
        R, B, *rest = flat_RB.shape
        ones = [1] * len(rest)
        result_RX = flat_RB.new_zeros(R, self.index_RX.shape[1], *rest)
        if result_RX.numel() == 0:
            return result_RX
        place_RB = self.position_RB.view(R, B, *ones).expand_as(flat_RB)
        return result_RX.scatter_add_(1, place_RB, flat_RB * self.computed_RB.view(R, B, *ones))


def choose_blocks(first_RAN: Tensor, wanted_RAN: Tensor, length_RAN: Tensor) -> BlockChoice:
    """Choose each wanted block once.

    Args:
        first_RAN: for every sample, the first sample of its group with the same tokens.
        wanted_RAN: blocks whose results are needed.
        length_RAN: tokens; blocks of similar length stand together, so that their forward pass holds little
            padding.
    """
    R, A, N = first_RAN.shape
    start_A1 = torch.arange(A, device=first_RAN.device)[:, None] * N
    stand_in_RB = (first_RAN + start_A1).flatten(1)
    needed_RB = torch.zeros(R, A * N, dtype=torch.int32, device=first_RAN.device)
    needed_RB.scatter_add_(1, stand_in_RB, wanted_RAN.flatten(1).int())
    chosen_RB = needed_RB > 0
    width = int(chosen_RB.sum(dim=1).max()) if chosen_RB.numel() else 0
    key_RB = torch.where(chosen_RB, 1 + length_RAN.flatten(1), 0)
    order_RB = key_RB.argsort(dim=1, descending=True, stable=True)
    place_RB = torch.empty_like(order_RB)
    place_RB.scatter_(1, order_RB, torch.arange(A * N, device=order_RB.device).expand_as(order_RB))
    index_RX = order_RB[:, :width]
    valid_RX = chosen_RB.gather(1, index_RX)
    computed_RB = chosen_RB.gather(1, stand_in_RB)
    position_RB = place_RB.gather(1, stand_in_RB).masked_fill(~computed_RB, 0)
    return BlockChoice(index_RX.masked_fill(~valid_RX, 0), valid_RX, position_RB, computed_RB)


def first_duplicates(tokens_RANG: Tensor, length_RAN: Tensor | None = None) -> Tensor:
    """`first_RAN`: for every sample, the index of the first sample of its group with equal tokens."""
    same_RANMG = tokens_RANG[..., :, None, :] == tokens_RANG[..., None, :, :]
    if length_RAN is None:
        return same_RANMG.all(dim=-1).int().argmax(dim=-1)
    behind_RANG = torch.arange(tokens_RANG.shape[-1], device=tokens_RANG.device) >= length_RAN[..., None]
    same_RANM = (same_RANMG | behind_RANG[..., :, None, :]).all(dim=-1)
    same_RANM &= length_RAN[..., :, None] == length_RAN[..., None, :]
    return same_RANM.int().argmax(dim=-1)


def parts_of(anchors_RX: Tensor, block_length: int, tokens_per_forward: int) -> Iterator[slice]:
    """Slices of the chosen blocks whose forward passes hold about `tokens_per_forward` tokens each."""
    R, X = anchors_RX.shape
    per_part = max(1, tokens_per_forward // max(1, R * block_length))
    # Equal parts: a short last one would waste a pass over the weights.
    count = -(-X // per_part)
    per_part = -(-X // count) if count else 1
    for start in range(0, X, per_part):
        yield slice(start, min(X, start + per_part))
