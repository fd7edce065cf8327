"""`group_gram`: kernel and reference against features that are written out, normalised and multiplied."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ebft_core.kernels.group_gram import group_gram
from ebft_core.losses import cfm_from_gram
from ebft_core.rewards import rewards_from_gram, valid_grams
from tests.oracles.slow_rewards import expected_rewards

TOLERANCE = {torch.float32: 1e-14, torch.bfloat16: 1e-6, torch.float16: 1e-6}
"""Sums in float64 for float32 states, in float32 for half precision."""

SHAPES = [(1, 1, 1, 1), (2, 3, 4, 70), (1, 2, 5, 128), (1, 2, 8, 257), (2, 1, 17, 33)]
"""R, A, N, H."""

BACKENDS = ("torch", "triton")


def _states(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, layers: int = 3, seed: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """Neighbouring layers differ in scale, as they do in a network; targets resemble samples."""
    R, A, N, H = shape
    generator = torch.Generator().manual_seed(seed)
    samples, targets = [], []
    for layer in range(layers):
        common = torch.randn(R, A, 1, H, generator=generator)
        rows = (torch.randn(R, A, N + 1, H, generator=generator) + common) * 10.0 ** (layer - 1)
        samples.append(rows[:, :, :N].to(device, dtype))
        targets.append(rows[:, :, N].to(device, dtype))
    return samples, targets


def _features(samples: list[Tensor], targets: list[Tensor], r: int, a: int) -> np.ndarray:
    """Rows [samples; target] of one group, (N+1, F·H), by the definition."""
    rows = []
    for j in range(samples[0].shape[2] + 1):
        parts = [
            (target[r, a] if j == sample.shape[2] else sample[r, a, j]).double().cpu().numpy()
            for sample, target in zip(samples, targets, strict=True)
        ]
        rows.append(np.concatenate([part / np.linalg.norm(part) for part in parts]) / len(parts) ** 0.5)
    return np.stack(rows)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (2, 3, 4, 70), (1, 2, 5, 128), (1, 2, 8, 257), (2, 1, 17, 33)]
)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_kernel(dtype: torch.dtype, shape: tuple[int, int, int, int], device: torch.device) -> None:
    samples, targets = _states(shape, dtype, device)
    gram = group_gram(samples, targets, backend="triton").double().cpu().numpy()
    plain = group_gram(samples, targets, backend="torch")
    assert plain.dtype == torch.float64
    for r in range(shape[0]):
        for a in range(shape[1]):
            rows = _features(samples, targets, r, a)
            np.testing.assert_allclose(gram[r, a], rows @ rows.T, atol=TOLERANCE[dtype], rtol=0)
            np.testing.assert_allclose(plain[r, a].cpu().numpy(), rows @ rows.T, atol=1e-14, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_views(dtype: torch.dtype, device: torch.device) -> None:
    """The last token of every block, as a view of all its tokens, and targets inside of a document."""
    samples, targets = _states((2, 3, 4, 24), dtype, device)
    blocks = [torch.stack([s * 0, s * 2, s], dim=3) for s in samples]
    documents = [torch.cat([t * 3, t], dim=1) for t in targets]
    views = [b[:, :, :, -1] for b in blocks], [d[:, 3:] for d in documents]
    assert not views[0][0].is_contiguous()
    expected = group_gram(samples, targets, backend="triton")
    assert torch.equal(group_gram(*views, backend="triton"), expected)
    across = [s.transpose(2, 3).contiguous().transpose(2, 3) for s in samples]  # not even H is contiguous
    assert torch.equal(group_gram(across, targets, backend="triton"), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_tokens_give_equal_rows(backend: str, device: torch.device) -> None:
    """Two computations of one text differ in bfloat16; the first one stands for both, bit by bit."""
    samples, targets = _states((2, 2, 4, 40), torch.bfloat16, device)
    for sample in samples:
        noise = 1 + 1e-2 * torch.randn(40, generator=torch.Generator().manual_seed(2))
        sample[0, 1, 3] = sample[0, 1, 1] * noise.to(device)
    first = torch.arange(4).repeat(2, 2, 1)
    first[0, 1, 3] = 1
    first[1, 0] = 0
    first = first.to(device)
    untouched = group_gram(samples, targets, backend=backend)
    gram = group_gram(samples, targets, first, backend=backend)
    assert torch.equal(gram[0, 1, 3], gram[0, 1, 1])
    assert torch.equal(gram[0, 1, :, 3], gram[0, 1, :, 1])
    assert torch.equal(gram[1, 0, :4], gram[1, 0, :1].expand(4, -1))
    assert torch.equal(gram[1, 0, :4, 4], untouched[1, 0, :1, 4].expand(4))
    assert torch.equal(gram[0, 0], untouched[0, 0])
    assert not torch.equal(untouched[0, 1, 3], untouched[0, 1, 1])
    diversity = rewards_from_gram(gram, whitening="feature", whiten_tol=2.0**-7).diversity.cpu()
    torch.testing.assert_close(diversity[0, 1], torch.tensor([0, 1 / 3, 0, 1 / 3]), atol=2e-4, rtol=0)
    torch.testing.assert_close(diversity[1, 0], torch.full((4,), 0.5), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("backend", BACKENDS)
def test_unusable_groups_show(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    """Zero or non-finite states mark their own group and no other; one dead layer of three does not."""
    samples, targets = _states((2, 3, 4, 40), dtype, device)
    for layer in (0, 1, 2):
        samples[layer][0, 1, 2] = 0
        targets[layer][1, 2] = 0
    samples[1][0, 2, 3, 7] = float("nan")
    samples[2][1, 0, 0, 0] = float("inf")
    targets[0][1, 1, 39] = float("-inf")
    samples[1][0, 0, 1] = 0
    gram = group_gram(samples, targets, backend=backend)
    expected = torch.tensor([[True, False, False], [False, False, False]])
    assert torch.equal(valid_grams(gram).cpu(), expected)
    for whitening in ("none", "feature", "sample"):
        rewards = rewards_from_gram(gram, whitening=whitening)
        for value in rewards:
            assert value.isfinite().all()
            assert (value.cpu()[~expected] == 0).all()
        assert (rewards.reward[0, 0] != 0).any()


@pytest.mark.parametrize("whitening", ["none", "feature", "sample"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rewards_from_the_kernel(dtype: torch.dtype, whitening: str, device: torch.device) -> None:
    """From hidden states to rewards and CFM, against explicit features and D × D matrices."""
    samples, targets = _states((1, 3, 4, 20), dtype, device, layers=2, seed=3)
    gram = group_gram(samples, targets, backend="triton")
    got = rewards_from_gram(gram, whitening=whitening, alignment_coef=0.7, diversity_coef=1.3)
    distance = cfm_from_gram(gram)
    for a in range(3):
        rows = _features(samples, targets, 0, a)
        X, y = rows[:4], rows[4]
        want = expected_rewards(X, y, whitening, 0.7, 1.3)
        np.testing.assert_allclose(got.reward[0, a].double().cpu().numpy(), want.reward, atol=2e-5)
        biased = float(((X.mean(0) - y) ** 2).sum())
        spread = float(((X - X.mean(0)) ** 2).sum()) / 3
        assert float(distance.biased[0, a]) == pytest.approx(biased, abs=2e-6)
        assert float(distance.unbiased[0, a]) == pytest.approx(biased - spread / 4, abs=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_groups(backend: str) -> None:
    gram = group_gram([torch.zeros(2, 0, 4, 8)], [torch.zeros(2, 0, 8)], backend=backend)
    assert gram.shape == (2, 0, 5, 5)


def test_refusals() -> None:
    samples, targets = _states((1, 2, 4, 8), torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="at least one layer"):
        group_gram([], [])
    with pytest.raises(ValueError, match="at least one layer"):
        group_gram(samples, targets[:2])
    with pytest.raises(ValueError, match="need targets"):
        group_gram(samples, [t[:, :1] for t in targets])
