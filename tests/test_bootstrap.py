"""The paired bootstrap against closed forms and against its own promise of coverage."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from ebft_core.bootstrap import PairedEstimate, paired_bootstrap


def _estimate(base_sum, base_weight, tuned_sum, tuned_weight=None, **options) -> PairedEstimate:
    options = {"resamples": 4000, "confidence": 0.95, "seed": 0, **options}
    tuned_weight = base_weight if tuned_weight is None else tuned_weight
    return paired_bootstrap(base_sum, base_weight, tuned_sum, tuned_weight, **options)


def _pair(documents: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two models whose document means share a large part: unpaired errors would be ten times too wide."""
    generator = np.random.default_rng(seed)
    hardness = generator.normal(5.0, 2.0, documents)
    base = hardness + generator.normal(0.0, 0.1, documents)
    return base, hardness - 0.05 + generator.normal(0.0, 0.1, documents)


def test_standard_error_of_equal_weights_is_the_textbook_one() -> None:
    base, tuned = _pair(200, seed=1)
    estimate = _estimate(base, np.ones(200), tuned)
    paired = (tuned - base).std(ddof=1) / math.sqrt(200)
    assert estimate.difference == pytest.approx((tuned - base).mean(), abs=1e-12)
    assert estimate.standard_error == pytest.approx(paired, rel=0.05)
    low, high = estimate.base_interval
    assert (high - low) / (2 * 1.96) == pytest.approx(base.std(ddof=1) / math.sqrt(200), rel=0.06)


def test_standard_error_of_a_ratio_is_the_delta_methods() -> None:
    """Documents of different lengths: the mean is Σ sum / Σ weight, a ratio of two random numbers."""
    generator = np.random.default_rng(2)
    weight = generator.integers(5, 200, 400).astype(float)
    rate = 2.0 + 0.004 * weight + generator.normal(0.0, 0.3, 400)
    base, tuned = rate * weight, (rate - 0.1 + generator.normal(0.0, 0.2, 400)) * weight
    estimate = _estimate(base, weight, tuned)
    mean = (tuned - base).sum() / weight.sum()
    linearised = ((tuned - base) - mean * weight) / weight.mean()
    assert estimate.difference == pytest.approx(mean, rel=1e-12)
    assert estimate.standard_error == pytest.approx(linearised.std(ddof=1) / 20, rel=0.05)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """400 experiments of 40 documents; binomial standard deviation of the share is 0.015 at 0.90."""
    hits = 0
    for experiment in range(400):
        base, tuned = _pair(40, seed=1000 + experiment)
        estimate = _estimate(base, np.ones(40), tuned, resamples=400, confidence=0.9, seed=experiment)
        hits += estimate.interval[0] <= -0.05 <= estimate.interval[1]
    assert 0.84 <= hits / 400 <= 0.94


def test_transform_is_applied_to_the_mean_and_not_to_documents() -> None:
    base, tuned = np.array([1.0, 6.0]), np.array([1.0, 4.0])
    weight = np.array([1.0, 3.0])
    estimate = _estimate(base, weight, tuned, transform=np.exp)
    assert estimate.base == pytest.approx(math.exp(7 / 4))
    assert estimate.difference == pytest.approx(math.exp(5 / 4) - math.exp(7 / 4))


def test_equal_models_have_no_difference_at_all() -> None:
    base, _ = _pair(30, seed=3)
    estimate = _estimate(base, np.ones(30), base.copy())
    assert (estimate.difference, estimate.standard_error, estimate.interval) == (0.0, 0.0, (0.0, 0.0))
    assert estimate.base_interval[0] < estimate.base < estimate.base_interval[1]


def test_a_document_without_weight_in_one_model_leaves_both() -> None:
    base, weight = np.array([1.0, 2.0, 50.0]), np.array([1.0, 1.0, 1.0])
    estimate = _estimate(base, weight, np.array([2.0, 3.0, 0.0]), np.array([1.0, 1.0, 0.0]))
    assert estimate.documents == 2
    assert (estimate.base, estimate.tuned) == (1.5, 2.5)


@pytest.mark.parametrize("documents", [0, 1])
def test_too_few_documents_give_no_interval(documents: int) -> None:
    values = np.full(documents, 3.0)
    estimate = _estimate(values, np.ones(documents), values + 1)
    assert math.isnan(estimate.standard_error)
    assert estimate.documents == documents
    assert math.isnan(estimate.base) if documents == 0 else estimate.difference == 1.0
    assert json.loads(json.dumps(estimate.to_json(), allow_nan=False))["interval"] == [None, None]


def test_json_round_trip_and_seed() -> None:
    base, tuned = _pair(25, seed=4)
    estimate = _estimate(base, np.ones(25), tuned)
    assert PairedEstimate.from_json(json.loads(json.dumps(estimate.to_json()))) == estimate
    assert _estimate(base, np.ones(25), tuned) == estimate
    assert _estimate(base, np.ones(25), tuned, seed=1).standard_error != estimate.standard_error


def test_blocks_of_resamples_bound_memory_without_losing_any(monkeypatch: pytest.MonkeyPatch) -> None:
    base, tuned = _pair(50, seed=5)
    whole = _estimate(base, np.ones(50), tuned, resamples=501)
    monkeypatch.setattr("ebft_core.bootstrap.RESAMPLE_ELEMENTS", 50 * 7)
    parts = _estimate(base, np.ones(50), tuned, resamples=501)
    assert parts.standard_error == pytest.approx(whole.standard_error, rel=1e-9)
