"""Triton kernel of `group_gram.py`, which has the mathematics.

One program per group, one launch per layer. A program reads the group's N+1 state vectors once, in
tiles over H, sums their products, normalises the small matrix by its own diagonal and adds it to the output.
Launches of one stream run in order, so the addition over layers needs no atomics.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebft_core.kernels.dispatch import dot_needs_float32

_MIN_DOT = 16
"""Smallest side of a tile product on the tensor cores."""


@triton.jit
def _gram_kernel(
    sample_ptr, target_ptr, gram_ptr,
    A, H, stride_sr, stride_sa, stride_sn, stride_tr, stride_ta, shortest,
    N: tl.constexpr, LAYERS: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr, ADD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    r, a = group // A, group % A
    m_M, h_H = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_H)
    sample_ptrs = sample_ptr + r * stride_sr + a * stride_sa + m_M[:, None] * stride_sn + h_H[None, :]
    target_ptrs = target_ptr + r * stride_tr + a * stride_ta + h_H
    acc = tl.zeros((BLOCK_M, BLOCK_M), dtype=tl.float64 if WIDE else tl.float32)
    for start in range(0, H, BLOCK_H):
        inside_h = h_H < H - start
        state_MH = tl.load(sample_ptrs + start, mask=(m_M < N)[:, None] & inside_h[None, :], other=0.0)
        target_H = tl.load(target_ptrs + start, mask=inside_h, other=0.0)
        state_MH = tl.where((m_M == N)[:, None], target_H[None, :], state_MH)
        if UPCAST:
            state_MH = state_MH.to(tl.float32)
        if WIDE:
            wide_MH = state_MH.to(tl.float64)
            acc += tl.sum(wide_MH[:, None, :] * wide_MH[None, :, :], axis=2)
        else:
            acc = tl.dot(state_MH, tl.trans(state_MH), acc)
    diagonal = m_M[:, None] == m_M[None, :]
    length_M = tl.sqrt(tl.sum(tl.where(diagonal, acc, 0.0), axis=1))
    length_M = tl.where(length_M < shortest, shortest, length_M)
    unit = acc / length_M[:, None] / length_M[None, :] / LAYERS
    out_ptrs = gram_ptr + group * (N + 1) * (N + 1) + m_M[:, None] * (N + 1) + m_M[None, :]
    real = (m_M <= N)[:, None] & (m_M <= N)[None, :]
    if ADD:
        unit += tl.load(out_ptrs, mask=real, other=0.0)
    tl.store(out_ptrs, unit, mask=real)


def gram_of_layers(samples: Sequence[Tensor], targets: Sequence[Tensor], shortest: float) -> Tensor:
    """`gram_RAMM` of unit-length layers over F; float64 for float32 states, else float32."""
    R, A, N, _ = samples[0].shape
    wide = samples[0].dtype == torch.float32
    gram_RAMM = samples[0].new_empty(R, A, N + 1, N + 1, dtype=torch.float64 if wide else torch.float32)
    block_m = triton.next_power_of_2(N + 1)
    # Wide products are spelled out as (M, M, H) tiles, which must fit into registers.
    block_h = max(4096 // block_m**2, 4) if wide else 128
    if gram_RAMM.numel() == 0:
        return gram_RAMM
    for layer, (sample_RANH, target_RAH) in enumerate(zip(samples, targets, strict=True)):
        sample = sample_RANH if sample_RANH.stride(-1) == 1 else sample_RANH.contiguous()
        target = target_RAH if target_RAH.stride(-1) == 1 else target_RAH.contiguous()
        with torch.cuda.device_of(sample):  # Triton launches on the current device
            _gram_kernel[(R * A,)](
                sample, target, gram_RAMM,
                A, sample.shape[-1], *sample.stride()[:3], *target.stride()[:2], shortest,
                N=N, LAYERS=len(samples), WIDE=wide, UPCAST=dot_needs_float32(sample.dtype), ADD=layer > 0,
                BLOCK_M=block_m if wide else max(block_m, _MIN_DOT),
                BLOCK_H=block_h, num_warps=4 if block_m <= 16 else 8,
            )  # fmt: skip
    return gram_RAMM
