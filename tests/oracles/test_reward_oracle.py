"""Oracle 3: rewards equal a float64 evaluation with explicit matrices.

The package works from the Gram matrix of the group; here whitening is done literally: the D×D matrix
(XᵀX)^{+1/2} applied to every feature, or the N×N matrix (XXᵀ)^{+1/2} mixing rows.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebft_core import group_rewards
from ebft_core.rewards import valid_groups

from .slow_rewards import expected_rewards

WHITENINGS = ("feature", "sample", "none")
D = 24


def _unit(X: np.ndarray) -> np.ndarray:
    return X / np.linalg.norm(X, axis=-1, keepdims=True)


def _distinct(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    common = rng.normal(size=D)  # features of neighbouring texts point the same way
    return _unit(rng.normal(size=(n, D)) + common), _unit(rng.normal(size=D) + common)


def _group(kind: str, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    X, y = _distinct(n, seed)
    if kind == "duplicated" and n > 1:
        X[n // 2] = X[0]
        X[n - 1] = X[0]
    elif kind == "all_equal":
        X[:] = X[0]
    elif kind == "collinear" and n > 2:
        X[2] = _unit(0.3 * X[0] + 0.9 * X[1])
    elif kind == "opposite" and n > 2:  # with two, the sign of `sample` whitening is 0/0
        X[1] = -X[0]
    elif kind == "close" and n > 1:  # singular values about 1e-3 of the largest: far above the cut-off
        X[1] = _unit(X[0] + 4e-3 * X[1])
    return X, y


KINDS = ("distinct", "duplicated", "all_equal", "collinear", "opposite", "close")


def _compare(X: np.ndarray, y: np.ndarray, whitening: str, atol: float, **coefs: float) -> None:
    alpha, delta = coefs.get("alignment_coef", 1.0), coefs.get("diversity_coef", 1.0)
    want = expected_rewards(X, y, whitening, alpha, delta)
    got = group_rewards(torch.from_numpy(X)[None], torch.from_numpy(y)[None], whitening=whitening, **coefs)
    for name in ("alignment", "diversity", "reward"):
        value = getattr(got, name)
        assert value.shape == (1, len(X))
        np.testing.assert_allclose(value[0].double().numpy(), getattr(want, name), atol=atol, err_msg=name)


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whitening", WHITENINGS)
def test_float64_groups(whitening: str, kind: str, n: int) -> None:
    _compare(*_group(kind, n, seed=n), whitening, atol=1e-6, alignment_coef=0.7, diversity_coef=1.3)


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whitening", WHITENINGS)
def test_float32_groups(whitening: str, kind: str, n: int) -> None:
    """float32 features (rounded: collinear ones are so only to 1e-7) through the same formulas."""
    X, y = (a.astype(np.float32) for a in _group(kind, n, seed=10 + n))
    want = expected_rewards(X.astype(np.float64), y.astype(np.float64), whitening)
    got = group_rewards(torch.from_numpy(X), torch.from_numpy(y), whitening=whitening)
    for name in ("alignment", "diversity", "reward"):
        # 1e-3 singular values amplify float32 rounding of an input that both sides share: no slack for it
        np.testing.assert_allclose(
            getattr(got, name).double().numpy(), getattr(want, name), atol=2e-5, err_msg=name
        )


@given(
    n=st.integers(1, 8),
    rank=st.integers(1, 8),
    seed=st.integers(0, 10**6),
    whitening=st.sampled_from(WHITENINGS),
    repeat=st.booleans(),
    alpha=st.floats(0, 3),
    delta=st.floats(0, 3),
)
def test_random_low_rank_groups(
    n: int, rank: int, seed: int, whitening: str, repeat: bool, alpha: float, delta: float
) -> None:
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(D, rank)))[0]
    weights = rng.normal(size=(n, rank))
    # Rows of bounded condition: one large own coordinate each, so nothing falls near the cut-off.
    weights[np.arange(n), np.arange(n) % rank] += 5.0
    X, y = _unit(weights @ basis.T), _unit(rng.normal(size=D))
    if repeat:
        X[-1] = X[0]
    _compare(X, y, whitening, atol=1e-6, alignment_coef=alpha, diversity_coef=delta)


@pytest.mark.parametrize("whitening", ["feature", "sample"])
def test_diversity_is_a_duplicate_penalty(whitening: str) -> None:
    """The numbers of the design: 1/3 for a duplicated pair among four, 1/2 for four equal samples."""
    X, y = _distinct(4, seed=5)
    independent = group_rewards(torch.from_numpy(X), torch.from_numpy(y), whitening=whitening)
    torch.testing.assert_close(independent.diversity.double(), torch.zeros(4).double(), atol=1e-8, rtol=0)
    X[2] = X[0]
    pair = group_rewards(torch.from_numpy(X), torch.from_numpy(y), whitening=whitening)
    expected = torch.tensor([1 / 3, 0, 1 / 3, 0], dtype=torch.float64)
    torch.testing.assert_close(pair.diversity.double(), expected, atol=1e-7, rtol=0)
    X[:] = X[0]
    equal = group_rewards(torch.from_numpy(X), torch.from_numpy(y), whitening=whitening)
    torch.testing.assert_close(equal.diversity.double(), torch.full((4,), 0.5).double(), atol=1e-7, rtol=0)


@pytest.mark.parametrize("whitening", ["feature", "sample"])
def test_float32_duplicates_stay_bounded(whitening: str) -> None:
    """Cosines stay cosines (a float32 eigen-decomposition once gave alignments of −1e8)."""
    for seed in range(20):
        X, y = (torch.from_numpy(a).float() for a in _distinct(8, seed))
        X[4:] = X[:4]
        got = group_rewards(X, y, whitening=whitening)
        assert got.alignment.abs().max() <= 2 + 1e-5
        assert torch.allclose(got.diversity, torch.full((8,), 2 * 0.5 / 7), atol=1e-5)
        assert torch.equal(got.reward[4:], got.reward[:4]) or torch.allclose(
            got.reward[4:], got.reward[:4], atol=1e-6
        )


def test_cut_off_follows_whiten_tol() -> None:
    """A direction of relative singular value 1e-3 counts with tolerance 1e-5 and not with 1e-2."""
    X, y = _group("close", 4, seed=3)
    values = np.linalg.svd(X, compute_uv=False)
    assert 3e-4 < values[-1] / values[0] < 5e-3
    tensors = torch.from_numpy(X), torch.from_numpy(y)
    for tol in (1e-5, 1e-2):
        got = group_rewards(*tensors, whitening="feature", whiten_tol=tol)
        want = expected_rewards(X, y, "feature", tol=tol)
        np.testing.assert_allclose(got.reward.double().numpy(), want.reward, atol=1e-6)
    fine, coarse = (expected_rewards(X, y, "feature", tol=t).reward for t in (1e-5, 1e-2))
    assert np.abs(fine - coarse).max() > 0.1


def test_cut_off_is_never_below_bfloat16_precision() -> None:
    """A sample and its copy, apart by bfloat16 rounding only, count as duplicates."""
    X, y = _distinct(4, seed=8)
    noisy = torch.from_numpy(X)
    noisy[3] = noisy[0] * (1 + 1.5e-3 * torch.randn(D, generator=torch.Generator().manual_seed(0)))
    features = noisy.bfloat16()
    assert not torch.equal(features[3], features[0])
    got = group_rewards(features, torch.from_numpy(y).bfloat16(), whitening="feature")
    expected = torch.tensor([1 / 3, 0, 0, 1 / 3])
    torch.testing.assert_close(got.diversity.float(), expected, atol=2e-2, rtol=0)


@pytest.mark.parametrize("whitening", WHITENINGS)
def test_unusable_groups_are_dropped_alone(whitening: str) -> None:
    """Zero or non-finite features: zeros for that group, its neighbours unchanged, nothing NaN."""
    groups = [_distinct(4, seed) for seed in range(9)]
    phi = torch.from_numpy(np.stack([g[0] for g in groups])).view(3, 3, 4, D).float()
    target = torch.from_numpy(np.stack([g[1] for g in groups])).view(3, 3, D).float()
    clean = group_rewards(phi, target, whitening=whitening)
    assert valid_groups(phi, target).all()
    assert valid_groups(phi, target).shape == (3, 3)
    phi, target = phi.clone(), target.clone()
    phi[0, 1] = 0
    phi[1, 0, 2] = 0
    phi[1, 2, 3, 5] = float("nan")
    phi[2, 0, 0, 0] = float("inf")
    target[2, 1] = 0
    target[2, 2, 7] = float("-inf")
    bad = torch.tensor([[False, True, False], [True, False, True], [True, True, True]])
    got = group_rewards(phi, target, whitening=whitening)
    assert torch.equal(valid_groups(phi, target), ~bad)
    for name in ("reward", "alignment", "diversity"):
        value = getattr(got, name)
        assert (value[bad] == 0).all(), name
        torch.testing.assert_close(value[~bad], getattr(clean, name)[~bad], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("whitening", WHITENINGS)
def test_target_orthogonal_to_every_sample(whitening: str) -> None:
    """The whitened target vanishes: alignment 0, not 0/0."""
    phi, target = torch.eye(6)[:3], torch.eye(6)[5]
    got = group_rewards(phi, target, whitening=whitening)
    assert valid_groups(phi, target)
    assert torch.equal(got.alignment, torch.zeros(3))
    torch.testing.assert_close(got.diversity, torch.zeros(3))


@pytest.mark.parametrize("whitening", WHITENINGS)
def test_leading_axes_are_only_a_loop(whitening: str) -> None:
    groups = [_group(kind, 5, seed) for seed, kind in enumerate(KINDS)]
    phi = torch.from_numpy(np.stack([g[0] for g in groups])).view(2, 3, 5, D)
    target = torch.from_numpy(np.stack([g[1] for g in groups])).view(2, 3, D)
    whole = group_rewards(phi, target, whitening=whitening)
    for r in range(2):
        for a in range(3):
            single = group_rewards(phi[r, a], target[r, a], whitening=whitening)
            torch.testing.assert_close(whole.reward[r, a], single.reward, atol=1e-7, rtol=1e-7)
