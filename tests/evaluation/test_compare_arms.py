"""The stage `compare`: every arm against the base, and the best against each other, with wider intervals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from ebft_core.base_model import BaseModelInfo, digest_model_folder, write_base
from ebft_core.bootstrap import paired_bootstrap
from ebft_core.comparison import ArmsComparison
from ebft_core.config import RunConfig
from ebft_core.evaluation import compare_models, measure_models, select_rows
from ebft_core.evaluation.metrics import METRICS, document_sums, documents_of
from ebft_core.events import EventWriter, read_events
from ebft_core.stage_runner import Preempted, StageContext
from ebft_core.stages import compare_arms
from ebft_core.stop import StopSignal
from evaluation.builders import make_row, run_config, save_model, tiny_model

HELDOUT = [make_row([length], 100 + length) for length in (18, 25, 21, 30, 16)]
GROUP: dict[str, Any] = {
    "kind": "compare",
    "metric": "cfm",
    "budget": "3 optimiser steps",
    "arms": {
        "base": {"stage": "prepare_base"},
        "sft": {"stage": "sft", "input": "arm-1"},
        "ebft": {"stage": "merge", "input": "arm-2"},
        "failed": {"stage": "merge", "input": "arm-3"},
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: save_model(tiny_model(seed=i), root / name) for i, name in enumerate(("base", "sft", "ebft"))
    }


def compared(models: dict[str, Path], config: RunConfig, metric: str) -> tuple[ArmsComparison, Any]:
    measured = measure_models(models, select_rows(HELDOUT, config), config, feature_path=models["base"])
    return compare_arms.compare(measured, models, {**GROUP, "metric": metric}, config), measured


def test_every_arm_stands_against_the_base_as_in_a_comparison_of_two(models: dict[str, Path]) -> None:
    config = run_config()
    result, _ = compared(models, config, "cfm")
    assert result.stages == {"sft": "sft", "ebft": "merge"}
    for name in ("sft", "ebft"):
        assert result.arms[name] == compare_models(models["base"], models[name], HELDOUT, config).evaluation


@pytest.mark.parametrize("metric", ["cfm", "alignment", "ce"])
def test_the_best_is_held_against_all_others_with_intervals_that_hold_together(
    models: dict[str, Path], metric: str
) -> None:
    config = run_config()
    result, measured = compared(models, config, metric)
    values = {name: result.value(name, metric) for name in models}
    direction = 1 if METRICS[metric].better == "lower" else -1
    assert result.best == min(values, key=lambda name: direction * values[name])
    assert set(result.contrasts) == set(models) - {result.best}
    assert result.contrast_confidence == pytest.approx(0.975)  # two others share the 5 percent
    documents = documents_of(measured["base"])
    for name, contrast in result.contrasts.items():
        other = document_sums(measured[name], METRICS[metric], documents)
        best = document_sums(measured[result.best], METRICS[metric], documents)
        expected = paired_bootstrap(
            other.sum_D, other.weight_D, best.sum_D, best.weight_D,
            resamples=200, confidence=0.975, seed=config.evaluate.seed,
        )  # fmt: skip
        assert contrast[metric] == expected
        plain = paired_bootstrap(
            other.sum_D, other.weight_D, best.sum_D, best.weight_D,
            resamples=200, confidence=0.95, seed=config.evaluate.seed,
        )  # fmt: skip
        assert np.diff(expected.interval) > np.diff(plain.interval)


def stage_context(tmp_path: Path, models: dict[str, Path]) -> StageContext:
    """What the runner hands to the stage: folders of the stages before it, and the group's `arms.json`."""
    base, rows, output = (tmp_path / name for name in ("prepare_base", "tokenize", "output"))
    for folder in (base, rows, output):
        folder.mkdir()
    write_base(base, BaseModelInfo(models["base"], digest_model_folder(models["base"]), "test"))
    columns = {name: [row[name] for row in HELDOUT] for name in HELDOUT[0] if name != "row_id"}
    Dataset.from_dict(columns).save_to_disk(str(rows / "heldout"))
    inputs = {"prepare_base": base, "tokenize": rows}
    for number, name in enumerate(("sft", "ebft"), 1):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model").symlink_to(models[name])
        inputs[f"arm-{number}"] = tmp_path / name
    (tmp_path / "arms.json").write_text(json.dumps(GROUP), encoding="utf-8")
    events = EventWriter(tmp_path / "compare.jsonl", "compare")
    return StageContext(run_config(), tmp_path, inputs, output, tmp_path / "work", events, StopSignal())


def test_the_stage_writes_numbers_and_samples_of_every_arm(tmp_path: Path, models: dict[str, Path]) -> None:
    context = stage_context(tmp_path, models)
    meta = compare_arms.run(context)
    document = json.loads((context.output / "comparison.json").read_text(encoding="utf-8"))
    expected, _ = compared(models, run_config(), "cfm")
    assert ArmsComparison.from_json(document).contrasts == expected.contrasts
    assert meta == {"best": expected.best, "answer": expected.answer}
    rollouts = json.loads((context.output / "rollouts.json").read_text(encoding="utf-8"))["arms"]
    assert list(rollouts) == ["sft", "ebft"]
    for one, other in zip(*rollouts.values(), strict=True):
        same = ("row_id", "anchor", "ground_truth", "base_samples")
        assert [one[key] for key in same] == [other[key] for key in same]
        assert one["tuned_samples"] != other["tuned_samples"]
    counts = [event for event in read_events(tmp_path / "compare.jsonl") if event["kind"] == "progress"]
    assert (counts[-1]["done"], counts[-1]["total"]) == (15, 15)


def test_the_stage_stops_when_asked_to(tmp_path: Path, models: dict[str, Path]) -> None:
    context = stage_context(tmp_path, models)
    context.stop.request("SIGTERM")
    with pytest.raises(Preempted):
        compare_arms.run(context)
    assert not list(context.output.iterdir())
