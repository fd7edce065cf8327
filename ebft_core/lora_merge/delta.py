"""The arithmetic of a merge, row block by row block, in float32.

In the layout in which the base stores it, every update is  L @ R · scale  with L (rows, r), R (r, columns):
    linear     W (out, in)      L = B,   R = A,   DoRA's norm over each row
    conv1d     W (in, out)      L = Aᵀ,  R = Bᵀ,  DoRA's norm over each column
    embedding  W (vocab, dim)   L = Aᵀ,  R = Bᵀ,  DoRA's norm over each column
DoRA: W' = magnitude / ‖W + ΔW‖ · (W + ΔW), the norm taken per output feature (PEFT's convention).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ebft_core.errors import UserError
from ebft_core.lora_merge.adapter import LoraFactors
from ebft_core.lora_merge.layout import ModuleKind


@dataclass(frozen=True)
class LowRankUpdate:
    """One update in the stored layout: left (rows, r), right (r, columns), DoRA magnitude or None."""

    left: Tensor
    right: Tensor
    scale: float
    magnitude: Tensor | None
    magnitude_per_row: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight it belongs to."""
        return self.left.shape[0], self.right.shape[1]

    def equals(self, other: LowRankUpdate) -> bool:
        """Whether both updates are the same function of the weight, value by value."""
        return (
            self.scale == other.scale
            and (self.magnitude is None or self.magnitude_per_row == other.magnitude_per_row)
            and _same(self.left, other.left)
            and _same(self.right, other.right)
            and _same(self.magnitude, other.magnitude)
        )


def low_rank_update(factors: LoraFactors, kind: ModuleKind) -> LowRankUpdate:
    """The update of a module whose weight is stored as `kind` says."""
    if kind is ModuleKind.LINEAR:
        return LowRankUpdate(factors.b, factors.a, factors.scale, factors.magnitude, True)
    return LowRankUpdate(factors.a.T, factors.b.T, factors.scale, factors.magnitude, False)


@dataclass(frozen=True)
class TensorUpdate:
    """What becomes of one base tensor: first replaced (if asked), then updated (if asked)."""

    replacement: Tensor | None = None
    low_rank: LowRankUpdate | None = None

    @property
    def changes(self) -> bool:
        """Whether anything happens to the tensor."""
        return self.replacement is not None or self.low_rank is not None

    def equals(self, other: TensorUpdate) -> bool:
        """Whether both give the same tensor from the same tensor."""
        if not _same(self.replacement, other.replacement):
            return False
        if self.low_rank is None or other.low_rank is None:
            return self.low_rank is other.low_rank
        return self.low_rank.equals(other.low_rank)

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise a UserError unless the update fits a base tensor of `shape`."""
        wanted: list[tuple[int, ...]] = []
        if self.replacement is not None:
            wanted.append(tuple(self.replacement.shape))
        if self.low_rank is not None:
            wanted.append(self.low_rank.shape)
        for update_shape in wanted:
            if update_shape != shape:
                raise UserError(
                    "the adapter does not fit the base model",
                    where=name,
                    value=f"update of shape {update_shape}",
                    expected=f"shape {shape}",
                    hint="it was trained on another base model, or the vocabulary was resized",
                )


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return torch.equal(left, right)


RowReader = Callable[[int, int], Tensor]


def row_merger(update: TensorUpdate, read_rows: RowReader, rows: int, step: int) -> RowReader:
    """A reader of the merged rows [start, stop) in float32; what it returns is valid until its next call.

    Updated rows are all computed in one buffer, because fresh memory for every block costs more than the
    arithmetic.

    Args:
        read_rows: gives rows [start, stop) of the base tensor in any float dtype.
        rows, step: number of rows, and how many to hold at once: DoRA over columns needs a pass of its own.
    """

    def read_source(start: int, stop: int) -> Tensor:
        if update.replacement is not None:
            return update.replacement[start:stop].float()
        return read_rows(start, stop).float()

    low_rank = update.low_rank
    if low_rank is None:
        return read_source
    right = low_rank.right.float().contiguous()
    buffer = torch.empty(min(step, rows), right.shape[1])

    def read_sum(start: int, stop: int) -> Tensor:
        left = low_rank.left[start:stop].float()
        source, out = read_source(start, stop), buffer[: stop - start]
        return torch.addmm(source, left, right, alpha=low_rank.scale, out=out)

    if low_rank.magnitude is None:
        return read_sum
    magnitude = low_rank.magnitude.float()
    if low_rank.magnitude_per_row:

        def read_row_normed(start: int, stop: int) -> Tensor:
            total = read_sum(start, stop)
            return total.mul_(
                magnitude[start:stop, None] / torch.linalg.vector_norm(total, dim=1, keepdim=True)
            )

        return read_row_normed

    square_sum = torch.zeros(low_rank.shape[1], dtype=torch.float64)
    for start in range(0, rows, step):
        square_sum += read_sum(start, min(start + step, rows)).square().sum(dim=0, dtype=torch.float64)
    factor = magnitude / square_sum.sqrt().float()
    return lambda start, stop: read_sum(start, stop).mul_(factor)
