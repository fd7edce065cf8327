"""The report: self-contained, complete, safe against what models write, and drawn where the numbers say."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from ebft_core.base_model import BaseModelInfo, write_base
from ebft_core.bootstrap import paired_bootstrap
from ebft_core.evaluation import METRICS, Evaluation
from ebft_core.events import EventWriter
from ebft_core.manifests import commit_folder, write_json_atomic
from ebft_core.promotion import Decision
from ebft_core.runs import RunPlan
from orchestration.builders import planned_run
from tasks.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    line_chart,
    make_scale,
    running_mean,
    tick_label,
)
from tasks.report import build_report
from tasks.report_markdown import markdown_report, markdown_table
from tasks.report_promotion import DECISION_JSON

EVIL = "</pre><script>alert(1)</script>"


class Tags(HTMLParser):
    """Collects what a browser would fetch or run, and checks that tags are closed in order."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.names: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    """A run whose stages prepare_base, train and evaluate are done."""
    plan = planned_run(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    base = tmp_path / "base"
    base.mkdir()
    write_base(base, BaseModelInfo(model, "d" * 64, "test"))
    commit_folder(base, plan.stage("prepare_base").output, schema="ebft.prepare_base/1", meta={})
    events = EventWriter(plan.run_dir / "events" / "train.jsonl", "train")
    for step in range(1, 61):
        events.metrics(step, {"ebft/cfm": 1 / step, "ebft/reward": float("nan"), "perf/rollout_seconds": 0.1})
    evaluation = tmp_path / "evaluation"
    evaluation.mkdir()
    (evaluation / "evaluation.json").write_text(json.dumps(comparison().to_json()), encoding="utf-8")
    example = {
        "row_id": 0, "document": "x", "anchor": 8, "context": "def f(", "ground_truth": "x):",
        "base_samples": ["abc"], "tuned_samples": [EVIL],
        "base_alignments": [0.1], "tuned_alignments": [0.25],
    }  # fmt: skip
    document = {"schema": "ebft.rollouts/1", "rollouts": [example]}
    (evaluation / "rollouts.json").write_text(json.dumps(document), encoding="utf-8")
    meta = {"wall_seconds": 12.34}
    commit_folder(evaluation, plan.stage("evaluate").output, schema="ebft.evaluate/1", meta=meta)
    return plan


def comparison() -> Evaluation:
    sums = np.array([[4.0, 5.0, 6.0], [3.0, 4.0, 5.5]])
    weight = np.ones(3)
    estimate = paired_bootstrap(
        sums[0], weight, sums[1], weight, resamples=50, confidence=0.95, seed=0, transform=None
    )
    counts = {"rows": 3, "documents": 3, "tokens": 9, "blocks": 3, "dropped_base": 0, "dropped_tuned": 0}
    settings = {"n_samples": 4, "seed": 0, "confidence": 0.95, "bootstrap_samples": 50}
    return Evaluation("b", "t", **counts, **settings, metrics=dict.fromkeys(METRICS, estimate))


def test_the_page_needs_nothing_and_runs_nothing(plan: RunPlan) -> None:
    page = build_report(plan.run_dir)
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.fetched == []
    assert "script" not in tags.names
    assert "@import" not in page
    assert "url(" not in page
    assert "prefers-color-scheme: dark" in page


def test_the_page_shows_what_was_measured(plan: RunPlan) -> None:
    page = build_report(plan.run_dir)
    for metric in METRICS.values():
        assert metric.label in page
    assert "5.0000" in page  # base: (4 + 5 + 6) / 3
    assert "4.1667" in page  # tuned: (3 + 4 + 5.5) / 3
    assert "-0.8333" in page
    assert "CFM (unbiased)" in page
    assert "ground truth" in page
    assert "alignment 0.250" in page
    assert "12.3" in page
    assert plan.run_key in page
    assert "d" * 64 in page
    assert "ce_coef: 0.5" in page


def test_the_short_form_has_the_comparison_the_gate_s_word_and_links(plan: RunPlan) -> None:
    write_json_atomic(plan.run_dir / "tracking.json", {"run_id": "abc", "experiment_id": "7"})
    decision = Decision(promote=False, checks=(), reason="CFM is not | better").to_json()
    document = {**decision, "name": "micro", "version": "3", "by": "gate"}
    write_json_atomic(plan.run_dir / DECISION_JSON, document)
    text = markdown_report(plan.run_dir)
    assert "| CFM (unbiased) | 5.0000 | 4.1667 | -0.8333 ± " in text
    assert "**micro version 3 refused** (by gate): CFM is not | better" in text
    assert "(http://127.0.0.1:5000/#/experiments/7/runs/abc/artifacts?workflowType=" in text
    assert "## Health" not in text  # nothing to say


def test_a_short_form_of_a_run_that_has_only_begun_says_where_it_is(tmp_path: Path) -> None:
    text = markdown_report(planned_run(tmp_path).run_dir)
    assert "Held-out" not in text
    assert "MLflow" not in text
    assert "report.html" in text


def test_cells_cannot_break_a_table() -> None:
    table = markdown_table([{"a": "x|y", "b": "z"}])
    assert table.splitlines() == ["| a | b |", "| --- | --- |", r"| x\|y | z |"]


def test_a_run_that_has_only_begun_has_a_report_too(tmp_path: Path) -> None:
    page = build_report(planned_run(tmp_path).run_dir)
    assert "not done" in page
    assert "<svg" not in page


def test_a_line_goes_through_its_points() -> None:
    points = [(0.0, 1.0), (5.0, 3.0), (10.0, 2.0)]
    root = ElementTree.fromstring(line_chart("t", {"a": points}))
    (line,) = [element for element in root if element.tag == "polyline"]
    drawn = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    left, right, top, bottom = LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM
    assert drawn == [(left, bottom), ((left + right) / 2, top), (right, (top + bottom) / 2)]


def test_points_that_are_no_numbers_are_left_out() -> None:
    assert line_chart("t", {"a": [(1.0, float("nan"))]}) == ""
    svg = line_chart("t", {"a": [(1.0, 1.0), (2.0, float("inf")), (3.0, 2.0)]})
    assert len(re.search(r'points="([^"]*)"', svg)[1].split()) == 2


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.0, 1.0), (0.13, 0.14), (5.5215, 5.5222), (-5e4, 3e7), (2.0, 2.0), (0.0, 0.0), (-1e-9, 0)],
)
def test_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    scale = make_scale(low, high, 0.0, 100.0)
    assert 2 <= len(scale.ticks) <= 6
    assert all(scale.low - 1e-9 <= tick <= scale.high * (1 + 1e-9) + 1e-12 for tick in scale.ticks)
    assert len({tick_label(tick, scale) for tick in scale.ticks}) == len(scale.ticks)
    assert scale(scale.low) == 0.0
    assert scale(scale.high) == pytest.approx(100.0)


def test_running_mean_is_that_of_numpy() -> None:
    values = np.random.default_rng(0).normal(size=50)
    expected = [values[max(0, i - 6) : i + 1].mean() for i in range(50)]
    assert [y for _, y in running_mean(list(enumerate(values)), 7)] == pytest.approx(expected)
