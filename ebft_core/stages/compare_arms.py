"""Stage `compare`: the base and the models of all arms on the same held-out rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ebft_core.arm_group import arm_models, read_group
from ebft_core.arms import BASE
from ebft_core.base_model import read_base
from ebft_core.bootstrap import PairedEstimate
from ebft_core.comparison import ArmsComparison, best_arm, joint_confidence
from ebft_core.config import RunConfig
from ebft_core.evaluation.compare import measure_models, paired_metrics, select_rows, summarise
from ebft_core.evaluation.examples import make_examples
from ebft_core.evaluation.records import Measurements
from ebft_core.manifests import write_json_atomic
from ebft_core.models import load_tokenizer
from ebft_core.stage_runner import StageContext
from ebft_core.stages.evaluate_model import ROLLOUTS_FILE, heldout_rows, progress_of

COMPARISON_FILE = "comparison.json"
ROLLOUTS_SCHEMA = "ebft.arm_rollouts/1"


def run(context: StageContext) -> dict[str, Any]:
    """Write `comparison.json` (schema in `comparison.py`) and the `rollouts.json` of every arm.

    Raises:
        UserError: no usable held-out row. Preempted: asked to stop.
    """
    config, group = context.config, read_group(context.run_dir)
    base_path = read_base(context.inputs["prepare_base"]).path
    models = {BASE: base_path, **arm_models(context.inputs, group)}
    context.events.phase("evaluate")
    heldout, stop_token_ids = heldout_rows(context)
    rows = select_rows(heldout, config)
    feature_model = config.evaluate.feature_model
    measured = measure_models(
        models,
        rows,
        config,
        feature_path=base_path if feature_model is None else Path(feature_model).expanduser(),
        stop_token_ids=stop_token_ids,
        progress=progress_of(context),
    )
    comparison = compare(measured, models, group, config)
    tokenizer = load_tokenizer(base_path, config)
    count = config.evaluate.sample_rollouts
    rollouts = {
        name: [e.to_json() for e in make_examples(rows, measured[BASE], measured[name], count, tokenizer)]
        for name in comparison.arms
    }
    write_json_atomic(context.output / COMPARISON_FILE, comparison.to_json())
    write_json_atomic(context.output / ROLLOUTS_FILE, {"schema": ROLLOUTS_SCHEMA, "arms": rollouts})
    return {"best": comparison.best, "answer": comparison.answer}


def compare(
    measured: Mapping[str, Measurements],
    models: Mapping[str, Path],
    group: Mapping[str, Any],
    config: RunConfig,
) -> ArmsComparison:
    """Every arm against the base, and the best one against each other.

    Args:
        measured: arm → its measurements, the base among them.
        models: arm → model folder.
        group: `arms.json`.
    """
    metric, trained = group["metric"], [name for name in models if name != BASE]
    evaluations = {
        name: summarise(measured[BASE], measured[name], config, models[BASE], models[name])
        for name in trained
    }
    values = {name: evaluations[name].metrics[metric].tuned for name in trained}
    values[BASE] = evaluations[trained[0]].metrics[metric].base
    best = best_arm(metric, values)
    others = [name for name in models if name != best]
    confidence = joint_confidence(config.evaluate.confidence, len(others))
    settings = config.evaluate.model_copy(update={"confidence": confidence})
    jointly = config.model_copy(update={"evaluate": settings})
    contrasts: dict[str, Mapping[str, PairedEstimate]] = {
        name: paired_metrics(measured[name], measured[best], jointly) for name in others
    }
    return ArmsComparison(
        kind=group["kind"],
        metric=metric,
        budget=group["budget"],
        best=best,
        stages={name: group["arms"][name]["stage"] for name in trained},
        arms=evaluations,
        contrast_confidence=confidence,
        contrasts=contrasts,
    )
