"""The metrics of an evaluation: what each is, its direction, and its sums per document.

Every metric is a ratio Σ sum / Σ weight over documents (perplexity its exponential), which is what the
bootstrap resamples. The weights are supervised tokens for cross-entropy, written tokens for the entropy and
blocks for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ebft_core.bootstrap import Floats
from ebft_core.evaluation.records import BlockRecord, Measurements


@dataclass(frozen=True)
class Metric:
    """One row of the result.

    Attributes:
        label: as people read it.
        better: the direction of improvement; None where neither direction is good in itself.
        per: what the weights count.
        block_value: the metric of one block (None: cross-entropy, which has token sums of its own).
        transform: applied to the mean.
        completions_only: blocks of a fixed length do not have it.
    """

    label: str
    better: Literal["lower", "higher"] | None
    per: Literal["token", "block", "problem"]
    block_value: Callable[[BlockRecord], float] | None = None
    transform: Callable[[Floats], Floats] | None = None
    completions_only: bool = False

    def weight(self, block: BlockRecord) -> int:
        """What a block counts."""
        return block.written_tokens if self.per == "token" else 1


METRICS: Mapping[str, Metric] = {
    "ce": Metric("cross-entropy (nats per token)", "lower", "token"),
    "perplexity": Metric("perplexity", "lower", "token", transform=np.exp),
    "cfm": Metric("CFM (unbiased)", "lower", "block", lambda block: block.cfm),
    "cfm_biased": Metric("CFM (biased)", "lower", "block", lambda block: block.cfm_biased),
    "alignment": Metric(
        "alignment (cosine)", "higher", "block", lambda block: float(np.mean(block.alignments))
    ),
    "best_of_n_alignment": Metric(
        "best-of-N alignment (cosine)", "higher", "block", lambda block: max(block.alignments)
    ),
    "diversity": Metric("similarity between samples", None, "block", lambda block: block.diversity),
    "duplicate_rate": Metric("duplicate rate", "lower", "block", lambda block: block.duplicate_rate),
    "entropy": Metric("entropy (nats)", None, "token", lambda block: block.entropy),
    "completion_tokens": Metric(
        "completion length (tokens)",
        None,
        "block",
        lambda block: block.written_tokens / len(block.tokens),
        completions_only=True,
    ),
    "truncated_rate": Metric(
        "completions cut at their bound",
        None,
        "block",
        lambda block: float(np.mean(block.truncated or ())),
        completions_only=True,
    ),
}


TASK_PREFIX = "tasks/"
"""Begins the names of the metrics of `evaluate.tasks`: `tasks/<task>/<metric>`."""


def metric_of(name: str) -> Metric:
    """The metric of that name: one of `METRICS`, or one of a downstream task, of which more is better.

    Raises:
        KeyError: there is no such metric.
    """
    prefix, _, rest = name.partition("/")
    if f"{prefix}/" != TASK_PREFIX:
        return METRICS[name]
    task, _, kind = rest.partition("/")
    return Metric(f"{task}: {kind}", "higher", "problem")


@dataclass(frozen=True)
class DocumentSums:
    """Per document (in the order asked for): sum and weight of one metric."""

    sum_D: Floats
    weight_D: Floats

    @property
    def mean(self) -> float:
        """Σ sum / Σ weight; NaN without any weight."""
        weight = float(self.weight_D.sum())
        return float(self.sum_D.sum()) / weight if weight > 0 else float("nan")


def metrics_of(measurements: Measurements) -> dict[str, Metric]:
    """The metrics that these measurements have: without those of completions where there are none."""
    completions = any(block.truncated is not None for block in measurements.blocks)
    return {name: metric for name, metric in METRICS.items() if completions or not metric.completions_only}


def documents_of(measurements: Measurements) -> list[str]:
    """Hashes of the documents that were measured, sorted."""
    found = {record.document for record in measurements.likelihoods}
    return sorted(found | {block.document for block in measurements.blocks})


def document_sums(measurements: Measurements, metric: Metric, documents: Sequence[str]) -> DocumentSums:
    """Sums of one metric over each of `documents`."""
    index = {document: i for i, document in enumerate(documents)}
    sum_D, weight_D = np.zeros(len(documents)), np.zeros(len(documents))
    if metric.block_value is None:
        for record in measurements.likelihoods:
            sum_D[index[record.document]] += record.nll_sum
            weight_D[index[record.document]] += record.tokens
        return DocumentSums(sum_D, weight_D)
    for block in measurements.blocks:
        if block.usable:
            weight = metric.weight(block)
            sum_D[index[block.document]] += metric.block_value(block) * weight
            weight_D[index[block.document]] += weight
    return DocumentSums(sum_D, weight_D)


def metric_means(measurements: Measurements) -> dict[str, float]:
    """Every metric of one model; those that the measurements do not determine are left out."""
    documents = documents_of(measurements)
    means = {}
    for name, metric in metrics_of(measurements).items():
        mean = document_sums(measurements, metric, documents).mean
        if np.isfinite(mean):
            means[name] = float(metric.transform(np.array(mean))) if metric.transform else mean
    return means
