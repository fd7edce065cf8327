"""The page of a comparison: complete, self-contained, readable with many arms, safe to open."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ebft_core.arm_group import ArmGroup, comparison_plan, plan_group, write_group
from ebft_core.arms import BASE
from ebft_core.comparison import ArmsComparison
from ebft_core.config import parse_config
from ebft_core.config.loading import with_overrides
from ebft_core.events import EventWriter
from ebft_core.manifests import commit_folder
from ebft_core.sweep import sweep_arms
from flows.group_summary import arms_table
from orchestration.builders import micro_document
from orchestration.test_report import EVIL, Tags
from tasks.charts import PALETTE_SIZE
from tasks.comparison_report import best_first, build_comparison_report
from tasks.track_arms import metric_part, track_arms
from tests.test_comparison import comparison

ARMS = 10


def group_of(folder: Path) -> ArmGroup:
    document = micro_document(folder)
    _, *arms = sweep_arms({"ebft.ce_coef": [n / 10 for n in range(ARMS)]}, where="--grid")
    planned = [(arm, parse_config(with_overrides(document, arm.overrides))) for arm in arms]
    return plan_group("sweep", parse_config(document), planned, metric="cfm", budget="4 optimiser steps")


def result_of(group: ArmGroup) -> ArmsComparison:
    """Arm n has CFM 0.9 - n / 100: the last one is the best."""
    return comparison(
        {BASE: 0.95, **{name: 0.9 - n / 100 for n, name in enumerate(group.runs)}}, kind="sweep"
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("sweep")
    group = group_of(folder)
    plan = comparison_plan(group, group.runs)
    write_group(group, plan)
    example: dict[str, Any] = {
        "row_id": 0, "document": "x", "anchor": 8, "context": "def f(", "ground_truth": "x):",
        "base_samples": ["abc"], "tuned_samples": [EVIL],
        "base_alignments": [0.1], "tuned_alignments": [0.25],
    }  # fmt: skip
    staging = folder / "staging"
    staging.mkdir()
    (staging / "comparison.json").write_text(json.dumps(result_of(group).to_json()), encoding="utf-8")
    rollouts = {"arms": {name: [example] for name in group.runs}}
    (staging / "rollouts.json").write_text(json.dumps(rollouts), encoding="utf-8")
    commit_folder(staging, plan.stage("compare").output, schema="ebft.compare/1", meta={})
    for run in group.runs.values():
        journal = EventWriter(run.plan.run_dir / "events" / "train.jsonl", "train")
        for step in range(1, 4):
            journal.metrics(step, {"ebft/cfm": 1 / step})
    return build_comparison_report(plan.run_dir, {"ce_coef=7": f"no room {EVIL}"})


def test_the_page_needs_nothing_and_runs_nothing(page: str) -> None:
    tags = Tags()
    tags.feed(page)
    assert (tags.open, tags.fetched) == ([], [])
    assert "script" not in tags.names


def test_the_page_shows_every_arm_the_best_first_and_the_failed_one(page: str) -> None:
    for n in range(ARMS):
        assert f"<summary>ce_coef={n / 10}</summary>" in page
    assert page.count("★") == 1
    assert "ce_coef=0.9 ★" in page
    assert "failed: no room" in page
    assert "The best arm, ce_coef=0.9, against each other" in page
    assert "0.8100" in page


def test_only_as_many_arms_are_drawn_as_there_are_colours(page: str) -> None:
    (label,) = re.findall(r'aria-label="CFM \(unbiased\): (.*?)"', page)
    assert label.split(", ") == [f"ce_coef={n / 10}" for n in range(ARMS - 1, ARMS - 1 - PALETTE_SIZE, -1)]
    assert f"Only the {PALETTE_SIZE} best arms are drawn" in page


def test_arms_without_a_value_come_last() -> None:
    result = comparison({BASE: 0.7, "a": float("nan"), "b": 0.5, "c": 0.4}, kind="sweep")
    assert best_first(result) == ["c", "b", "a"]


def test_an_mlflow_that_is_away_is_a_warning_per_arm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = group_of(tmp_path)
    source = tmp_path / "comparison.json"
    source.touch()
    track_arms(group, result_of(group), source, "http://127.0.0.1:9")
    assert len([r for r in caplog.records if "not in MLflow yet" in r.getMessage()]) == ARMS


def test_names_of_arms_become_names_of_metrics() -> None:
    assert metric_part("ebft+ce") == "ebft_ce"
    assert metric_part('ce_coef=0.3 target_modules=["q"]') == "ce_coef_0.3 target_modules___q__"


@pytest.mark.parametrize(("arms", "first"), [(2, "CFM (unbiased)"), (12, "base")])
def test_the_terminal_table_is_as_narrow_as_it_can_be(arms: int, first: str) -> None:
    names = [BASE, *(f"arm{n}" for n in range(1, arms))]
    table = arms_table(comparison({name: 0.7 - 0.01 * n for n, name in enumerate(names)}))
    lines = [str(cell) for cell in table.columns[0].cells]
    headings = [str(column.header) for column in table.columns[1:]]
    assert lines[0] == first
    assert len(lines) >= len(headings)
    assert f"arm{arms - 1} ★" in (*lines, *headings)
