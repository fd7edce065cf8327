"""Gram matrices of the features of every group, straight from the hidden states of the feature layers.

The feature of sample i is its F layer vectors x_i^f, each divided by its length, side by side, over √F.
Of a group all that rewards and the feature-matching distance need is the Gram matrix of its N samples
and its target (in that order):

    K_ij = 1/F Σ_f  (x_i^f · x_j^f) / (‖x_i^f‖ ‖x_j^f‖)

The lengths are on the diagonal of the raw products, so one pass over the states gives products and
lengths, and only (N+1) × (N+1) numbers are normalised afterwards. The features themselves, F·H numbers per
sample, never exist: plain torch reads and writes them some ten times on the way.

How precise. Whitening cuts singular values off at `whiten_tol` of the largest, which is its square in K.
States in half precision are no more precise than 2⁻⁸ or 2⁻¹¹; their products are exact in float32 and
are summed there, with errors well below that square. float32 states are summed in float64, in the kernel as
in the reference.

A group with a state that is not finite has a diagonal that is not; a sample whose states are all zero
has a zero row. `rewards.valid_grams` drops both. Legend: see `geometry.py`; M = N+1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ebft_core.kernels.dispatch import KernelBackend, use_kernel

SHORTEST = 1e-12
"""Vectors shorter than this are not blown up to unit length."""


def group_gram(
    samples: Sequence[Tensor],
    targets: Sequence[Tensor],
    first_RAN: Tensor | None = None,
    *,
    backend: KernelBackend = "auto",
) -> Tensor:
    """Gram matrices `gram_RAMM` of the groups' features; the target is the last row. No gradient.

    Args:
        samples: per feature layer, pooled states of the samples `(R, A, N, H)`.
        targets: per feature layer, pooled states of the target `(R, A, H)`.
        first_RAN: for every sample the first sample of its group with equal tokens
            (`blocks.first_duplicates`): its row is used for both, so their rows are equal bit by bit.
        backend: kernel or reference; `auto` decides by the device.

    Returns:
        float32 from half-precision states on the kernel, else float64.

    Raises:
        ValueError: no layer, or shapes that do not fit.

    Example:
        >>> layers = [torch.randn(1, 2, 4, 16) for _ in range(3)]
        >>> gram_RAMM = group_gram(layers, [layer[:, :, 0] for layer in layers])
        >>> gram_RAMM.shape, bool((gram_RAMM[..., 0, 4] - 1).abs().max() < 1e-6)
        (torch.Size([1, 2, 5, 5]), True)
    """
    _check(samples, targets)
    with torch.no_grad():
        if use_kernel(backend, samples[0].device, samples[0].dtype):
            from ebft_core.kernels.group_gram_triton import gram_of_layers

            gram_RAMM = gram_of_layers(samples, targets, SHORTEST)
        else:
            gram_RAMM = reference(samples, targets)
        return gram_RAMM if first_RAN is None else _share_rows(gram_RAMM, first_RAN)


def reference(samples: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """The same in plain torch, in float64: normalise, then multiply."""
    gram = torch.zeros((), dtype=torch.float64, device=samples[0].device)
    for sample_RANH, target_RAH in zip(samples, targets, strict=True):
        state_RAMH = torch.cat([sample_RANH, target_RAH[..., None, :]], dim=-2).double()
        unit_RAMH = torch.nn.functional.normalize(state_RAMH, dim=-1, eps=SHORTEST)
        gram = gram + unit_RAMH @ unit_RAMH.transpose(-1, -2)
    return gram / len(samples)


def _share_rows(gram_RAMM: Tensor, first_RAN: Tensor) -> Tensor:
    """Rows and columns of the first sample with the same tokens, for every sample; the target's own."""
    N = first_RAN.shape[-1]
    target_RA1 = first_RAN.new_full((*first_RAN.shape[:-1], 1), N)
    rows_RAM1 = torch.cat([first_RAN, target_RA1], dim=-1)[..., None]
    by_row = gram_RAMM.gather(-2, rows_RAM1.expand_as(gram_RAMM))
    return by_row.gather(-1, rows_RAM1.transpose(-1, -2).expand_as(gram_RAMM))


def _check(samples: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    if not samples or len(samples) != len(targets):
        raise ValueError(f"need as many targets as samples and at least one layer, got {len(samples)} layers")
    for sample, target in zip(samples, targets, strict=True):
        if sample.dim() != 4 or sample.shape[:2] + sample.shape[3:] != target.shape:
            shapes = f"{tuple(sample.shape)} and {tuple(target.shape)}"
            raise ValueError(f"samples (R, A, N, H) need targets (R, A, H), got {shapes}")
