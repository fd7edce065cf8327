"""Rewards and advantages of one group in float64 numpy, with explicit D×D or N×N matrices."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Expected(NamedTuple):
    reward: np.ndarray
    alignment: np.ndarray
    diversity: np.ndarray


def _inverse_root(gram: np.ndarray, tolerance: float) -> np.ndarray:
    """gram^{+1/2} by eigen-decomposition; singular values of X (roots of the eigenvalues) are cut off."""
    values, vectors = np.linalg.eigh(gram)
    roots = np.sqrt(np.clip(values, 0, None))
    keep = roots > tolerance * roots.max()
    # Rounding of the D×D product itself leaves eigenvalues around 1e-16 of the largest one.
    keep &= values > 1e-13 * values.max()
    inverse = np.where(keep, 1.0 / np.where(keep, roots, 1.0), 0.0)
    return (vectors * inverse) @ vectors.T


def _whiten(X: np.ndarray, y: np.ndarray, whitening: str, tolerance: float) -> tuple[np.ndarray, np.ndarray]:
    """Whitened samples (N, D) and one whitened target per sample (N, D)."""
    targets = np.repeat(y[None], len(X), axis=0)
    if whitening == "none":
        return X, targets
    if whitening == "feature":
        W = _inverse_root(X.T @ X, tolerance)
        return X @ W, targets @ W
    W = _inverse_root(X @ X.T, tolerance)
    return W @ X, W @ targets


def _cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    scale = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return np.divide((a * b).sum(-1), scale, out=np.zeros_like(scale), where=scale > 1e-12)


def expected_rewards(
    X: np.ndarray, y: np.ndarray, whitening: str, alpha: float = 1.0, delta: float = 1.0, tol: float = 1e-5
) -> Expected:
    """One group in float64."""
    n = len(X)
    Z, T = _whiten(X, y, whitening, tol)
    alignment = 2 * ((Z * T).sum(-1) if whitening == "none" else _cosine(Z, T))
    similarity = Z @ Z.T
    diversity = np.zeros(n)
    for j in range(n):
        others = [similarity[j, k] for k in range(n) if k != j]
        diversity[j] = 2 * sum(others) / (n - 1) if others else 0.0
    return Expected(alpha * alignment - delta * diversity, alignment, diversity)


def rloo(expected: Expected, alpha: float = 1.0, delta: float = 1.0) -> np.ndarray:
    """Reward minus the leave-one-out baselines of alignment and diversity, sample by sample (N ≥ 3)."""
    a, d, n = expected.alignment, expected.diversity, len(expected.reward)
    baseline = [alpha * (a.sum() - a[j]) / (n - 1) - delta * (d.sum() - 2 * d[j]) / (n - 2) for j in range(n)]
    return expected.reward - np.array(baseline)
