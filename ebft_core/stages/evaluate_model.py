"""Stage `evaluate`: base, tuned and further models on held-out rows, the run's own or frozen ones."""

from __future__ import annotations

from typing import Any

from ebft_core.base_model import read_base
from ebft_core.data.heldout import HELDOUT, frozen_heldout
from ebft_core.data.stop_tokens import read_stop_token_ids
from ebft_core.data.store import read_rows
from ebft_core.evaluation import Comparison, compare_models
from ebft_core.manifests import write_json_atomic
from ebft_core.stage_runner import Preempted, StageContext
from ebft_core.tokenizer import load_tokenizer

EVALUATION_FILE = "evaluation.json"
ROLLOUTS_FILE = "rollouts.json"
ROLLOUTS_SCHEMA = "ebft.rollouts/1"


def run(context: StageContext) -> dict[str, Any]:
    """Write `evaluation.json` (schema in `evaluation/summary.py`) and `rollouts.json`.

    Raises:
        UserError: no usable held-out row, or models and rows of different tokenizers.
        Preempted: asked to stop.
    """

    def progress(done: int, total: int) -> None:
        if context.stop.requested:
            raise Preempted(f"stopped while evaluating: {context.stop.reason}")
        context.events.progress("evaluate", done, total, "rows")

    config = context.config
    base = read_base(context.inputs["prepare_base"])
    frozen = frozen_heldout(config, load_tokenizer(base.path, config.model))
    tokenized = frozen or context.inputs["tokenize"]
    structured = config.ebft.mode == "structured"
    context.events.phase("evaluate")
    comparison = compare_models(
        base.path,
        context.inputs["merge"] / "model",
        read_rows(tokenized / HELDOUT),
        config,
        stop_token_ids=read_stop_token_ids(tokenized) if structured else (),
        progress=progress,
    )
    write_json_atomic(context.output / EVALUATION_FILE, comparison.evaluation.to_json())
    write_json_atomic(context.output / ROLLOUTS_FILE, rollouts_document(comparison))
    metrics = comparison.evaluation.metrics
    return {name: metrics[name].to_json() for name in metrics}


def rollouts_document(comparison: Comparison) -> dict[str, Any]:
    """The examples as JSON: a list of `RolloutExample`s under `rollouts`."""
    return {"schema": ROLLOUTS_SCHEMA, "rollouts": [example.to_json() for example in comparison.examples]}
