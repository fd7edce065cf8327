"""Triton kernels of `selective_logprob.py`, which has the mathematics.

Both kernels walk tiles (X × V) of logits, each a loop of tile products over H in float32. The forward
kernel folds a tile into a running maximum, sum and mean; the vocabulary may be split among programs when
there are few rows, and the parts are joined outside. The backward kernel turns the tile into ∂L/∂z.
Offsets are 64-bit: V · H of a large model passes 2³¹.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebft_core.kernels.dispatch import dot_needs_float32

CHUNK_ALIGN = 256
"""Vocabulary chunks of the backward pass are multiples of this, so that no tile is cut."""

PROGRAMS = 528
"""Programs that fill a large GPU (four per multiprocessor of an H200); few row tiles split the vocabulary."""


class Tile(NamedTuple):
    x: int
    v: int
    h: int
    warps: int
    stages: int


def tile_for(hidden_XH: Tensor) -> Tile:
    """Half precision runs on the tensor cores, float32 in full precision does not and wants small tiles.

    The wide tile needs 144 KB of shared memory, which data-centre GPUs have; it spills a few registers
    outside of the inner loop and reads a third less from the cache than the next smaller one.
    """
    if hidden_XH.dtype == torch.float32 or not hidden_XH.is_cuda:
        return Tile(32, 64, 32, 4, 2)
    if hidden_XH.shape[0] <= 64:
        return Tile(64, 128, 64, 4, 3)
    major, minor = torch.cuda.get_device_capability(hidden_XH.device)
    if (major, minor) == (8, 0) or major in (9, 10):
        return Tile(128, 256, 64, 8, 3)
    return Tile(128, 128, 64, 8, 3 if major >= 8 else 2)


def _precision(dtype: torch.dtype) -> str:
    """float32 products follow torch's own setting."""
    full = dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return "ieee" if full else "tf32"


@triton.jit
def _logits(
    hidden_ptr, weight_ptr, bias_ptr, x_X, v_V, X, V, H, inverse_temperature,
    HAS_BIAS: tl.constexpr, EVEN_H: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One tile of z = (h · w + b) / τ; entries outside of (X, V) are those of zero operands."""
    h_H = tl.arange(0, BLOCK_H)
    hidden_ptrs = hidden_ptr + x_X.to(tl.int64)[:, None] * H + h_H[None, :]
    weight_ptrs = weight_ptr + v_V.to(tl.int64)[None, :] * H + h_H[:, None]
    inside_x, inside_v = (x_X < X)[:, None], (v_V < V)[None, :]
    z_XV = tl.zeros((BLOCK_X, BLOCK_V), dtype=tl.float32)
    for start in range(0, H, BLOCK_H):
        if EVEN_H:
            hidden_XH = tl.load(hidden_ptrs, mask=inside_x, other=0.0)
            weight_HV = tl.load(weight_ptrs, mask=inside_v, other=0.0)
        else:
            inside_h = h_H < H - start
            hidden_XH = tl.load(hidden_ptrs, mask=inside_x & inside_h[None, :], other=0.0)
            weight_HV = tl.load(weight_ptrs, mask=inside_v & inside_h[:, None], other=0.0)
        if UPCAST:
            hidden_XH, weight_HV = hidden_XH.to(tl.float32), weight_HV.to(tl.float32)
        z_XV = tl.dot(hidden_XH, weight_HV, z_XV, input_precision=PRECISION)
        hidden_ptrs += BLOCK_H
        weight_ptrs += BLOCK_H
    if HAS_BIAS:
        z_XV += tl.load(bias_ptr + v_V, mask=v_V < V, other=0.0).to(tl.float32)[None, :]
    return z_XV * inverse_temperature


@triton.jit
def _forward_kernel(
    hidden_ptr, weight_ptr, bias_ptr, tokens_ptr, picked_ptr, lse_ptr, mean_ptr,
    X, V, H, inverse_temperature, tiles_per_split,
    N: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_H: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    split, splits = tl.program_id(1), tl.num_programs(1)
    x_X = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    inside = x_X < X
    top_X = tl.full((BLOCK_X,), float("-inf"), dtype=tl.float32)
    sum_X = tl.zeros((BLOCK_X,), dtype=tl.float32)
    mean_X = tl.zeros((BLOCK_X,), dtype=tl.float32)
    first = split * tiles_per_split * BLOCK_V
    last = tl.minimum(first + tiles_per_split * BLOCK_V, V)
    for start in range(first, last, BLOCK_V):
        v_V = start + tl.arange(0, BLOCK_V)
        z_XV = _logits(
            hidden_ptr, weight_ptr, bias_ptr, x_X, v_V, X, V, H, inverse_temperature,
            HAS_BIAS, EVEN_H, PRECISION, UPCAST, BLOCK_X, BLOCK_V, BLOCK_H,
        )  # fmt: skip
        for n in range(N):
            # Every token lies in exactly one tile, so its logit is stored once, by one program.
            token_X = tl.load(tokens_ptr + x_X * N + n, mask=inside, other=-1)
            picked_X = tl.sum(tl.where(v_V[None, :] == token_X[:, None], z_XV, 0.0), axis=1)
            hit_X = inside & (token_X >= start) & (token_X < start + BLOCK_V)
            tl.store(picked_ptr + x_X * N + n, picked_X, mask=hit_X)
        real_V = (v_V < V)[None, :]
        new_top_X = tl.maximum(top_X, tl.max(tl.where(real_V, z_XV, float("-inf")), axis=1))
        shrink_X = tl.exp(top_X - new_top_X)
        weight_XV = tl.where(real_V, tl.exp(z_XV - new_top_X[:, None]), 0.0)
        sum_X = sum_X * shrink_X + tl.sum(weight_XV, axis=1)
        mean_X = mean_X * shrink_X + tl.sum(weight_XV * z_XV, axis=1)
        top_X = new_top_X
    tl.store(lse_ptr + x_X * splits + split, top_X + tl.log(sum_X), mask=inside)
    tl.store(mean_ptr + x_X * splits + split, mean_X / sum_X, mask=inside)


@triton.jit
def _gradient_kernel(
    hidden_ptr, weight_ptr, bias_ptr, tokens_ptr, lse_ptr, grad_ptr, d_logits_ptr,
    X, V, H, inverse_temperature,
    N: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_H: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    x_X = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    v_V = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = x_X < X
    z_XV = _logits(
        hidden_ptr, weight_ptr, bias_ptr, x_X, v_V, X, V, H, inverse_temperature,
        HAS_BIAS, EVEN_H, PRECISION, UPCAST, BLOCK_X, BLOCK_V, BLOCK_H,
    )  # fmt: skip
    # Rows outside of X get probability 0 rather than an overflow.
    softmax_XV = tl.exp(z_XV - tl.load(lse_ptr + x_X, mask=inside, other=float("inf"))[:, None])
    total_X = tl.zeros((BLOCK_X,), dtype=tl.float32)
    for n in range(N):
        total_X += tl.load(grad_ptr + x_X * N + n, mask=inside, other=0.0)
    d_XV = -softmax_XV * total_X[:, None]
    for n in range(N):
        token_X = tl.load(tokens_ptr + x_X * N + n, mask=inside, other=-1)
        grad_X = tl.load(grad_ptr + x_X * N + n, mask=inside, other=0.0)
        d_XV += tl.where(v_V[None, :] == token_X[:, None], grad_X[:, None], 0.0)
    where_XV = x_X.to(tl.int64)[:, None] * V + v_V[None, :]
    tl.store(
        d_logits_ptr + where_XV,
        d_XV.to(d_logits_ptr.dtype.element_ty),
        mask=inside[:, None] & (v_V < V)[None, :],
    )


def forward(
    hidden_XH: Tensor, weight_VH: Tensor, tokens_XN: Tensor, temperature: float, bias_V: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Chosen logits `picked_XN`, and per vocabulary split the log-sum-exp and mean logit, `(X, S)` each."""
    (X, H), (V, _), N = hidden_XH.shape, weight_VH.shape, tokens_XN.shape[1]
    weight_VH = weight_VH.contiguous()
    tile = tile_for(hidden_XH)
    row_tiles, vocabulary_tiles = triton.cdiv(X, tile.x), triton.cdiv(V, tile.v)
    wanted = max(1, min(vocabulary_tiles, PROGRAMS // row_tiles))
    per_split = triton.cdiv(vocabulary_tiles, wanted)
    splits = triton.cdiv(vocabulary_tiles, per_split)  # so that none is empty
    picked_XN = hidden_XH.new_empty(X, N, dtype=torch.float32)
    lse_XS, mean_XS = (hidden_XH.new_empty(X, splits, dtype=torch.float32) for _ in range(2))
    with torch.cuda.device_of(hidden_XH):  # Triton launches on the current device
        _forward_kernel[(row_tiles, splits)](
            hidden_XH, weight_VH, bias_V, tokens_XN, picked_XN, lse_XS, mean_XS,
            X, V, H, 1.0 / temperature, per_split,
            N=N, **_constants(hidden_XH, bias_V, tile),
        )  # fmt: skip
    return picked_XN, lse_XS, mean_XS


def logit_gradient(
    hidden_XH: Tensor,
    weight_CH: Tensor,
    tokens_XN: Tensor,
    temperature: float,
    bias_C: Tensor | None,
    lse_X1: Tensor,
    grad_XN: Tensor,
    *,
    out_XC: Tensor,
) -> None:
    """Write τ · ∂L/∂(h · w + b) of a chunk of the vocabulary into `out_XC`.

    Args:
        tokens_XN: counted from the chunk's first row; those outside of the chunk match nothing.
        lse_X1: log-sum-exp over the whole vocabulary.
        grad_XN: ∂L/∂logprob, float32.
    """
    (X, H), (C, _), N = hidden_XH.shape, weight_CH.shape, tokens_XN.shape[1]
    tile = tile_for(hidden_XH)
    with torch.cuda.device_of(hidden_XH):
        _gradient_kernel[(triton.cdiv(X, tile.x), triton.cdiv(C, tile.v))](
            hidden_XH, weight_CH, bias_C, tokens_XN, lse_X1, grad_XN, out_XC,
            X, C, H, 1.0 / temperature,
            N=N, **_constants(hidden_XH, bias_C, tile),
        )  # fmt: skip


def _constants(hidden_XH: Tensor, bias: Tensor | None, tile: Tile) -> dict[str, int | bool | str]:
    return {
        "HAS_BIAS": bias is not None,
        "EVEN_H": hidden_XH.shape[1] % tile.h == 0,
        "PRECISION": _precision(hidden_XH.dtype),
        "UPCAST": dot_needs_float32(hidden_XH.dtype),
        "BLOCK_X": tile.x,
        "BLOCK_V": tile.v,
        "BLOCK_H": tile.h,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
