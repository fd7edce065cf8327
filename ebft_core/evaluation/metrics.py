"""Sums of the metrics per document.

Every metric is a ratio Σ sum / Σ weight over documents (perplexity its exponential), which is what the
bootstrap resamples. The weights are supervised tokens for cross-entropy, written tokens for the entropy and
blocks for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ebft_core.bootstrap import Floats
from ebft_core.evaluation.records import Measurements
from ebft_core.metrics import METRICS, Metric


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
