"""The metrics of an evaluation: what each is called, its direction, and its value for one block.

`evaluation/metrics.py` sums them over documents. Imports nothing heavy: rules of the configuration read the
names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ebft_core.bootstrap import Floats
    from ebft_core.evaluation.records import BlockRecord


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


def _exponential(mean: Floats) -> Floats:
    import numpy as np

    return np.exp(mean)


METRICS: Mapping[str, Metric] = {
    "ce": Metric("cross-entropy (nats per token)", "lower", "token"),
    "perplexity": Metric("perplexity", "lower", "token", transform=_exponential),
    "cfm": Metric("CFM (unbiased)", "lower", "block", lambda block: block.cfm),
    "cfm_biased": Metric("CFM (biased)", "lower", "block", lambda block: block.cfm_biased),
    "alignment": Metric("alignment (cosine)", "higher", "block", lambda block: fmean(block.alignments)),
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
        lambda block: fmean(block.truncated or (math.nan,)),
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
