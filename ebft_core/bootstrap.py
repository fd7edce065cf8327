"""Paired bootstrap over documents: how sure a difference between two models is.

Both models are measured on the same documents, so a resample draws documents and takes both models'
numbers for them: what makes a document hard for both cancels in the difference. Documents and not
tokens or rollouts are drawn, because those of one document are not independent.

Legend: D documents (or problems of a task), B resamples, S statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Interval = tuple[float, float]

RESAMPLE_ELEMENTS = 2**22
"""Counts held at once: bounds the memory of many documents times many resamples."""


@dataclass(frozen=True)
class PairedEstimate:
    """A metric of two models on the same documents.

    Attributes:
        base, tuned, difference: point estimates; difference = tuned - base.
        standard_error: of the difference. NaN with fewer than two documents, like every interval.
        interval, base_interval, tuned_interval: percentile intervals of the difference and of each model.
        documents: documents that have a weight in both models.
    """

    base: float
    tuned: float
    difference: float
    standard_error: float
    interval: Interval
    base_interval: Interval
    tuned_interval: Interval
    documents: int

    def to_json(self) -> dict[str, object]:
        """JSON values; numbers that are not finite become null."""
        plain = {key: _plain(value) for key, value in asdict(self).items()}
        return {**plain, "documents": self.documents}

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> PairedEstimate:
        """The inverse of `to_json`."""
        return cls(**{name: _restore(values[name]) for name in cls.__dataclass_fields__})  # type: ignore[arg-type]


def paired_bootstrap(
    base_sum_D: Floats,
    base_weight_D: Floats,
    tuned_sum_D: Floats,
    tuned_weight_D: Floats,
    *,
    resamples: int,
    confidence: float,
    seed: int,
    transform: Callable[[Floats], Floats] | None = None,
) -> PairedEstimate:
    """Bootstrap the weighted mean Σ sum / Σ weight of two models and their difference.

    Args:
        base_sum_D, tuned_sum_D: each document's sum of the metric over its tokens or blocks.
        base_weight_D, tuned_weight_D: how many tokens or blocks that is. A document without weight in
            either model is left out of both, which keeps the pairs whole.
        resamples: B.
        confidence: coverage of the intervals, in (0, 1).
        seed: of the resamples; equal seeds draw equal documents.
        transform: applied to each mean (perplexity is exp of a mean); None: identity.

    Raises:
        ValueError: arrays of different lengths.
    """
    table_4D = np.stack(
        [np.asarray(a, dtype=np.float64) for a in (base_sum_D, base_weight_D, tuned_sum_D, tuned_weight_D)]
    )
    table_4D = table_4D[:, (table_4D[1] > 0) & (table_4D[3] > 0)]
    apply = transform or (lambda mean: mean)
    return bootstrap_statistics(
        table_4D[:2],
        table_4D[2:],
        lambda sums_2X: apply(sums_2X[0] / sums_2X[1]),
        resamples=resamples,
        confidence=confidence,
        seed=seed,
    )


def bootstrap_statistics(
    base_SD: Floats,
    tuned_SD: Floats,
    score: Callable[[Floats], Floats],
    *,
    resamples: int,
    confidence: float,
    seed: int,
) -> PairedEstimate:
    """Bootstrap any metric that is a function of sums over documents, such as BLEU.

    Args:
        base_SD, tuned_SD: S statistics of each document that add up.
        score: from sums `(S, X)` to the metric `(X,)`.
        resamples, confidence, seed: as for `paired_bootstrap`.

    Raises:
        ValueError: arrays of different shapes.
    """
    if base_SD.shape != tuned_SD.shape:
        raise ValueError(f"statistics {base_SD.shape} and {tuned_SD.shape} are no pairs")
    S, documents = base_SD.shape
    table_TD = np.concatenate([base_SD, tuned_SD])  # T = 2·S
    if documents == 0:
        nan = (math.nan, math.nan)
        return PairedEstimate(math.nan, math.nan, math.nan, math.nan, nan, nan, nan, 0)
    whole_T1 = table_TD.sum(axis=1, keepdims=True)
    base, tuned = float(score(whole_T1[:S])[0]), float(score(whole_T1[S:])[0])
    if documents == 1:
        nan = (math.nan, math.nan)
        return PairedEstimate(base, tuned, tuned - base, math.nan, nan, nan, nan, 1)
    sums_TB = _resampled_sums(table_TD, resamples, seed)
    base_B, tuned_B = score(sums_TB[:S]), score(sums_TB[S:])
    difference_B = tuned_B - base_B
    tail = (1.0 - confidence) / 2

    def interval(values_B: Floats) -> Interval:
        low, high = np.quantile(values_B, [tail, 1.0 - tail])
        return float(low), float(high)

    return PairedEstimate(
        base=base,
        tuned=tuned,
        difference=tuned - base,
        standard_error=float(difference_B.std(ddof=1)),
        interval=interval(difference_B),
        base_interval=interval(base_B),
        tuned_interval=interval(tuned_B),
        documents=documents,
    )


def _resampled_sums(table_TD: Floats, resamples: int, seed: int) -> Floats:
    """Sums (T, B) over D documents drawn with replacement, B times."""
    D = table_TD.shape[1]
    generator = np.random.default_rng(seed)
    step = max(1, RESAMPLE_ELEMENTS // D)
    parts = []
    for start in range(0, resamples, step):
        count_BD = generator.multinomial(D, np.full(D, 1.0 / D), size=min(step, resamples - start))
        parts.append(table_TD @ count_BD.T)
    return np.concatenate(parts, axis=1)


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return value if isinstance(value, float) and math.isfinite(value) else None


def _restore(value: object) -> object:
    if isinstance(value, list):
        return tuple(_restore(part) for part in value)
    return math.nan if value is None else value
