"""Whitened alignment and similarity of one group, from its Gram matrix alone.

X ∈ R^{N×D} holds the samples' features φ_j, y the target's. All that whitening needs is K = XXᵀ, c = Xy
and ‖y‖²; no D × D matrix is ever built. With P = K K⁺:

* `feature`: φ̃ = (XᵀX)^{+1/2} φ for samples and target alike.
  similarity = P; alignment_j = (K⁺c)_j / (√P_jj · √(cᵀK⁺K⁺c)).
* `sample`: rows mixed by K^{+1/2}, the target as it is.
  similarity = P; alignment_j = sign(Σ_k (K^{+1/2})_jk) · (K^{+1/2}c)_j / (√P_jj · ‖y‖).
* `none`: alignment = c; similarity = K.

P is the identity for N independent samples, so after whitening the similarity of two different
samples is 0 and the diversity term is a penalty on duplicates and on nothing else. That is why
duplicates must be exact rows, and why everything here is float64: in float32 a duplicated group gave
alignments of -1e8. Legend: see `geometry.py`; `*` any leading axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

TINY = 1e-300
"""Keeps 0 / 0 at 0 in float64 where a sample or the projected target has no whitened length."""


class Whitened(NamedTuple):
    """alignment `(*, N)` and similarity `(*, N, N)`."""

    alignment: Tensor
    similarity: Tensor


def precision_of(features: Tensor, parameter: Tensor) -> float:
    """Relative precision of features: their own, or that of the network that made them if it is coarser.

    Args:
        parameter: any one of the network; under autocast, float32 weights are multiplied more coarsely.
    """
    dtypes, kind = [features.dtype, parameter.dtype], parameter.device.type
    if torch.is_autocast_enabled(kind):
        dtypes.append(torch.get_autocast_dtype(kind))
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def gram_of(phi: Tensor, target: Tensor) -> Tensor:
    """Inner products of the rows of `[phi; target]`, `(*, N+1, N+1)` float64, the target last.

    Args:
        phi: features of the samples, `(*, N, D)`. target: of the ground truth, `(*, D)`.
    """
    rows = torch.cat([phi, target[..., None, :]], dim=-2).double()
    return rows @ rows.transpose(-1, -2)


def whiten(gram: Tensor, method: str, tolerance: float) -> Whitened:
    """Alignment and similarity under a whitening method, float64.

    Args:
        gram: Gram matrix of the samples and, last, the target, `(*, N+1, N+1)`.
        method: `feature`, `sample` or `none`.
        tolerance: singular values of X below this share of the largest count as zero.
    """
    if method not in WHITENING:
        raise ValueError(f"unknown whitening {method!r}; known: {', '.join(WHITENING)}")
    gram = gram.double()
    return WHITENING[method](_Parts(gram[..., :-1, :-1], gram[..., :-1, -1], gram[..., -1, -1]), tolerance)


class _Parts(NamedTuple):
    """K `(*, N, N)`, c `(*, N)` and ‖y‖² `(*,)`."""

    samples: Tensor
    cross: Tensor
    target: Tensor


def _none(gram: _Parts, tolerance: float) -> Whitened:
    del tolerance
    return Whitened(gram.cross, gram.samples)


def _feature(gram: _Parts, tolerance: float) -> Whitened:
    vectors, values, kept = _spectrum(gram.samples, tolerance)
    projector = _rebuild(vectors, kept)
    solved = _apply(vectors, torch.where(kept > 0, 1.0 / values, 0.0), gram.cross)
    length = solved.norm(dim=-1, keepdim=True)
    return Whitened(solved / (_row_length(projector) * length).clamp(min=TINY), projector)


def _sample(gram: _Parts, tolerance: float) -> Whitened:
    vectors, values, kept = _spectrum(gram.samples, tolerance)
    projector = _rebuild(vectors, kept)
    inverse_root = torch.where(kept > 0, values.rsqrt(), 0.0)
    sign = _apply(vectors, inverse_root, torch.ones_like(gram.cross)).sign()
    mixed = _apply(vectors, inverse_root, gram.cross)
    scale = _row_length(projector) * gram.target.sqrt()[..., None]
    return Whitened(sign * mixed / scale.clamp(min=TINY), projector)


WHITENING: dict[str, Callable[[_Parts, float], Whitened]] = {
    "feature": _feature,
    "sample": _sample,
    "none": _none,
}


def _spectrum(gram: Tensor, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvectors, eigenvalues (1 where dropped) and a 0/1 mask of those that are kept."""
    values, vectors = torch.linalg.eigh(gram)
    # Eigenvalues of K are squared singular values of X.
    kept = (values > tolerance**2 * values[..., -1:]) & (values > 0)
    return vectors, torch.where(kept, values, 1.0), kept.double()


def _rebuild(vectors: Tensor, values: Tensor) -> Tensor:
    return (vectors * values[..., None, :]) @ vectors.transpose(-1, -2)


def _apply(vectors: Tensor, values: Tensor, vector: Tensor) -> Tensor:
    """V diag(values) Vᵀ vector."""
    inner = vectors.transpose(-1, -2) @ vector[..., None]
    return (vectors @ (values[..., None] * inner))[..., 0]


def _row_length(projector: Tensor) -> Tensor:
    return projector.diagonal(dim1=-2, dim2=-1).clamp(min=0.0).sqrt()
