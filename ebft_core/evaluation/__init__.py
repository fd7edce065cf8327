"""Measure models on held-out rows and compare two of them.

`records.py` holds what is measured, `metrics.py` turns it into sums per document, `summary.py` is the
result (JSON), `table.py` prints it, `examples.py` picks rollouts to read; these import without torch.
`sampling.py` lets a model write, `measure.py` runs one model over rows, `compare.py` runs two. torch is
imported when one of their names is touched.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ebft_core.evaluation.records import BlockRecord, LikelihoodRecord, Measurements
from ebft_core.evaluation.summary import Evaluation, Reference, RolloutExample
from ebft_core.evaluation.table import print_table
from ebft_core.metrics import METRICS, Metric

if TYPE_CHECKING:
    from ebft_core.evaluation.compare import (
        Comparison,
        compare_models,
        measure_models,
        paired_metrics,
        select_rows,
        training_evaluator,
    )
    from ebft_core.evaluation.measure import evaluate_rows

__all__ = [
    "METRICS",
    "BlockRecord",
    "Comparison",
    "Evaluation",
    "LikelihoodRecord",
    "Measurements",
    "Metric",
    "Reference",
    "RolloutExample",
    "compare_models",
    "evaluate_rows",
    "measure_models",
    "paired_metrics",
    "print_table",
    "select_rows",
    "training_evaluator",
]

_HOMES = {
    "Comparison": "ebft_core.evaluation.compare",
    "compare_models": "ebft_core.evaluation.compare",
    "measure_models": "ebft_core.evaluation.compare",
    "paired_metrics": "ebft_core.evaluation.compare",
    "select_rows": "ebft_core.evaluation.compare",
    "training_evaluator": "ebft_core.evaluation.compare",
    "evaluate_rows": "ebft_core.evaluation.measure",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ebft_core.evaluation' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
