"""The result of `ebft compare` and `ebft sweep` (`comparison.json`, schema `ebft.comparison/1`):

    {"schema": "ebft.comparison/1",
     "kind",                                compare | sweep
     "metric", "budget",                    what decides, and how long every arm trained
     "best",                                the arm that is best in the metric; `base` may be
     "answer",                              one sentence
     "stages": {arm: stage},                sft | merge: where the arm's model comes from
     "arms": {arm: evaluation},             every trained arm against the base (`ebft.evaluation/1`)
     "contrast_confidence",                 of the intervals below
     "contrasts": {arm: {metric: estimate}}}  the best arm (tuned) against each other arm (base)

The best of several arms is partly the luckiest, so the intervals of the contrasts are widened: they hold
together, for all other arms, with the confidence of the evaluation (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ebft_core.arms import BASE
from ebft_core.bootstrap import PairedEstimate
from ebft_core.evaluation.summary import Evaluation
from ebft_core.metrics import metric_of

SCHEMA = "ebft.comparison/1"
SFT = "sft"

Kind = Literal["compare", "sweep"]
Judgement = Literal["better", "worse"]


@dataclass(frozen=True)
class ArmsComparison:
    """All arms on the same held-out rows; the fields are those of the document above."""

    kind: Kind
    metric: str
    budget: str
    best: str
    stages: Mapping[str, str]
    arms: Mapping[str, Evaluation]
    contrast_confidence: float
    contrasts: Mapping[str, Mapping[str, PairedEstimate]]

    @property
    def answer(self) -> str:
        """What the numbers say, in one sentence."""
        ebft = [name for name in self.arms if self.stages[name] != SFT]
        asks = self.kind == "compare" and SFT in self.arms and bool(ebft)
        return _instead_of_sft(self, ebft) if asks else _best_of_all(self)

    def value(self, arm: str, metric: str) -> float:
        """A metric of an arm, or of the base; NaN where it was not determined."""
        if arm == BASE:
            return next(iter(self.arms.values())).metrics[metric].base
        return self.arms[arm].metrics[metric].tuned

    def to_json(self) -> dict[str, Any]:
        """The document described above."""
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "metric": self.metric,
            "budget": self.budget,
            "best": self.best,
            "answer": self.answer,
            "stages": dict(self.stages),
            "arms": {name: evaluation.to_json() for name, evaluation in self.arms.items()},
            "contrast_confidence": self.contrast_confidence,
            "contrasts": {
                name: {metric: estimate.to_json() for metric, estimate in metrics.items()}
                for name, metrics in self.contrasts.items()
            },
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ArmsComparison:
        """The inverse of `to_json`.

        Raises:
            ValueError: another schema.
        """
        if document.get("schema") != SCHEMA:
            raise ValueError(f"not a comparison: schema {document.get('schema')!r}, expected {SCHEMA!r}")
        plain = ("kind", "metric", "budget", "best", "stages", "contrast_confidence")
        return cls(
            arms={name: Evaluation.from_json(values) for name, values in document["arms"].items()},
            contrasts={
                name: {metric: PairedEstimate.from_json(values) for metric, values in metrics.items()}
                for name, metrics in document["contrasts"].items()
            },
            **{name: document[name] for name in plain},
        )


def best_arm(metric: str, values: Mapping[str, float]) -> str:
    """The arm with the best value; values that are not finite win nothing.

    Raises:
        ValueError: no value is finite, or the metric has no direction.
    """
    better = metric_of(metric).better
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    if better is None or not finite:
        raise ValueError(f"no arm is best in {metric}")
    return (max if better == "higher" else min)(finite, key=lambda name: finite[name])


def joint_confidence(confidence: float, arms: int) -> float:
    """The confidence of each of `arms` intervals that hold together with `confidence`."""
    return 1.0 - (1.0 - confidence) / max(1, arms)


def judge(metric: str, estimate: PairedEstimate) -> Judgement | None:
    """Whether the interval puts `tuned` on the better or on the worse side; None: it holds zero."""
    low, high = estimate.interval
    if not (low > 0 or high < 0):
        return None
    return "better" if (low > 0) == (metric_of(metric).better == "higher") else "worse"


def _instead_of_sft(result: ArmsComparison, ebft: list[str]) -> str:
    """Should EBFT be used instead of SFT on this data?"""
    metric = result.metric
    doubt = _doubt(result)
    if doubt is not None:
        return doubt
    challenger = best_arm(metric, {name: result.value(name, metric) for name in ebft})
    other = challenger if result.best == SFT else SFT
    estimates = result.contrasts[other]
    numbers = _numbers(result, other)
    if judge(metric, estimates[metric]) is None:
        return f"Not determined: {numbers}{_place(result)}."
    verdict = "No: SFT is the better choice here" if result.best == SFT else "Yes"
    return f"{verdict}: {numbers}{_price(metric, estimates)}{_place(result)}."


def _best_of_all(result: ArmsComparison) -> str:
    metric = result.metric
    doubt = _doubt(result)
    if doubt is not None:
        return doubt
    tied = [
        name
        for name, estimates in result.contrasts.items()
        if name != BASE and judge(metric, estimates[metric]) is None
    ]
    told = f"; not to be told from it: {', '.join(f'`{name}`' for name in tied)}" if tied else ""
    return f"Best: {_numbers(result, BASE)}{told}{_place(result)}."


def _doubt(result: ArmsComparison) -> str | None:
    """The answer where training itself has not been shown to help; None: the best arm beats the base."""
    if result.best == BASE:
        label = metric_of(result.metric).label
        return f"No: no arm is better than the untrained base in {label}{_place(result)}."
    if judge(result.metric, result.contrasts[BASE][result.metric]) is None:
        return f"Not determined: {_numbers(result, BASE)}{_place(result)}."
    return None


def _numbers(result: ArmsComparison, other: str) -> str:
    estimate = result.contrasts[other][result.metric]
    low, high = estimate.interval
    return (
        f"`{result.best}` has a {metric_of(result.metric).label} of {estimate.tuned:.4f}, `{other}` of "
        f"{estimate.base:.4f} (difference {estimate.difference:+.4f}, interval [{low:+.4f}, {high:+.4f}])"
    )


def _price(metric: str, estimates: Mapping[str, PairedEstimate]) -> str:
    """What the better arm costs in cross-entropy, which no arm may hide."""
    if metric == "ce" or judge("ce", estimates["ce"]) != "worse":
        return ""
    return f", but its cross-entropy is worse by {estimates['ce'].difference:.4f} nats per token"


def _place(result: ArmsComparison) -> str:
    counted = next(iter(result.arms.values())).metrics[result.metric].documents
    unit = "problems" if metric_of(result.metric).per == "problem" else "held-out documents"
    return f", on {counted} {unit} after {result.budget}"
