"""The report of a structured run: its own charts, and completions that people can read."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from orchestration.builders import micro_document

from ebft_core.bootstrap import paired_bootstrap
from ebft_core.config import parse_config
from ebft_core.evaluation import METRICS, Evaluation, RolloutExample
from ebft_core.evaluation.summary import CompletionNote
from ebft_core.events import EventWriter
from ebft_core.manifests import commit_folder
from ebft_core.runs import RunPlan, plan_run, write_run_folder
from tasks.report import build_report
from tasks.report_rollouts import Piece, pieces, rollout_views

EVIL = "</pre><script>alert(1)</script>"
TRUTH = "Four.<user>And three and three?<assistant>Six."
USER = (TRUTH.index("<user>"), TRUTH.index("Six."))


class Page(HTMLParser):
    """Texts of a page by the class of their element, and whether all tags are closed in order."""

    VOID = frozenset({"meta"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.texts: dict[str, list[str]] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append((tag, dict(attrs).get("class") or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for tag, name in self.open:
            self.texts.setdefault(name or tag, []).append(data)


def example(**changes: object) -> RolloutExample:
    sample = f"5.<user>And three and three?<assistant>{EVIL}"
    notes = (CompletionNote(9, True, ((2, sample.index(EVIL)),)), CompletionNote(1, False))
    fields = {
        "row_id": 3, "document": "x", "anchor": 8, "context": "Two and two?", "ground_truth": TRUTH,
        "base_samples": (sample, "long " * 400), "tuned_samples": ("Four.", ""),
        "base_alignments": (0.125, 0.5), "tuned_alignments": (0.75, 0.0), "ground_truth_given": (USER,),
        "base_notes": notes, "tuned_notes": (CompletionNote(2, False), CompletionNote(0, True)), **changes,
    }  # fmt: skip
    return RolloutExample(**fields)


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    """A structured run with a journal and a comparison."""
    document = micro_document(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 3, encoding="utf-8")
    document["data"] |= {
        "sources": [{"path": str(tmp_path / "rows.jsonl")}],
        "transform": "prompt_completion",
    }
    document["ebft"] |= {"mode": "structured"}
    document["rollout"] = {"use_vllm": False}
    config = parse_config(document)
    plan = plan_run(config)
    write_run_folder(plan, config)
    events = EventWriter(plan.run_dir / "events" / "train.jsonl", "train")
    for step in range(1, 61):
        events.metrics(step, structured_values(step))
    folder = tmp_path / "evaluation"
    folder.mkdir()
    (folder / "evaluation.json").write_text(json.dumps(comparison().to_json()), encoding="utf-8")
    examples = [example().to_json(), example(context="before " * 500 + "the question?").to_json()]
    document = {"schema": "ebft.rollouts/1", "rollouts": examples}
    (folder / "rollouts.json").write_text(json.dumps(document), encoding="utf-8")
    commit_folder(folder, plan.stage("evaluate").output, schema="ebft.evaluate/1", meta={})
    return plan


def comparison() -> Evaluation:
    weight = np.ones(3)
    values = np.array([[4.0, 5.0, 6.0], [3.0, 4.0, 5.5]])
    estimate = paired_bootstrap(
        values[0], weight, values[1], weight, resamples=50, confidence=0.95, seed=0, transform=None
    )
    counts = {"rows": 3, "documents": 3, "tokens": 9, "blocks": 3, "dropped_base": 0, "dropped_tuned": 0}
    settings = {"n_samples": 2, "seed": 0, "confidence": 0.95, "bootstrap_samples": 50, "mode": "structured"}
    return Evaluation("b", "t", **counts, **settings, metrics=dict.fromkeys(METRICS, estimate))


def structured_values(step: int) -> dict[str, float]:
    """A step's metrics; those of every kind that only structured runs write."""
    return {
        "ebft/cfm": 1 / step,
        "rollout/tokens_per_second": 900.0 + step,
        "rollout/seconds": 3.0,
        "rollout/waited_seconds": 0.25,
        "rollout/completion_tokens": 40.0 + step % 7,
        "rollout/truncated_rate": 0.125,
        "rollout/masked_fraction": 0.0,
        "rollout/failed_prompts": 0.0,
        "rollout/replaced_groups": float(step % 3),
        "rollout/is_ratio_min": 0.5,
        "rollout/is_ratio_mean": 1.0 + 0.01 * (step % 5),
        "rollout/is_ratio_max": 1.75,
        "rollout/effective_sample_size": 0.9,
        "policy_lag": 2.0,
        "rewards/length": 0.1 * step,
        **({"sync/version": float(step), "sync/seconds": 0.7, "sync/canary": 0.01} if step % 2 else {}),
    }


def read(plan: RunPlan) -> tuple[str, Page]:
    text = build_report(plan.run_dir)
    page = Page()
    page.feed(text)
    assert page.open == []
    return text, page


def test_every_metric_of_a_structured_step_is_drawn(plan: RunPlan) -> None:
    _, page = read(plan)
    titles = page.texts["h3"]
    for title in (
        "Generated tokens per second", "Seconds of generation", "Completions cut or left out", "Policy lag",
        "Importance ratio", "Weight sync: canary", "Own reward: length",
    ):  # fmt: skip
        assert titles.count(title) == 1, title
    legend = " ".join(page.texts["figcaption"])
    for name, last in (("waited for", 0.25), ("largest", 1.75), ("cut at their bound", 0.125), ("steps", 2)):
        assert f"{name} {last:.4g}" in legend


def test_charts_of_other_runs_are_not_empty_panels(tmp_path: Path, plan: RunPlan) -> None:
    (plan.run_dir / "events" / "train.jsonl").unlink()
    events = EventWriter(plan.run_dir / "events" / "train.jsonl", "train")
    events.metrics(1, {"ebft/cfm": 0.5, "rollout/is_ratio_mean": float("nan"), "rollout/is_ratio_max": 1.5})
    _, page = read(plan)
    assert page.texts["h3"] == ["CFM (unbiased)", "Importance ratio"]
    (legend,) = [text for text in page.texts["figcaption"] if "largest" in text]
    assert "mean nan" not in legend


def test_completions_are_shown_with_what_the_model_did_not_write(plan: RunPlan) -> None:
    text, page = read(plan)
    assert "<script" not in text
    assert "Completions of held-out prompts" in text
    assert page.texts["given"].count("<user>And three and three?<assistant>") == 4  # truth and sample, twice
    assert "like this" in page.texts["given"]
    captions = page.texts["dim caption"]
    assert captions.count("alignment 0.125 · 9 tokens · cut at its bound") == 2
    assert captions.count("alignment 0.750 · 2 tokens") == 2
    for metric in METRICS.values():
        assert metric.label in page.texts["td"]


def test_long_texts_unfold_and_lose_nothing(plan: RunPlan) -> None:
    text, _ = read(plan)
    view = rollout_views(plan.stage("evaluate").output / "rollouts.json")[1]
    for passage, whole in ((view.context, "before " * 500 + "the question?"), (view.base[1], "long " * 400)):
        assert "".join(p.text for p in (*passage.earlier, *passage.shown, *passage.later)) == whole
        assert len("".join(p.text for p in passage.shown)) < 1600
        assert f"{passage.hidden} " in text
    assert view.context.shown[-1].text.endswith("the question?")  # the end of a prompt is what is answered
    assert view.base[1].shown[0].text.startswith("long")
    assert len(re.findall(r"<details class=.more.>", text)) == 3


def test_pieces_split_where_given_parts_begin_and_end() -> None:
    assert pieces("abcdef", ((2, 4),)) == [Piece("ab", False), Piece("cd", True), Piece("ef", False)]
    assert pieces("abcdef", ((2, 4),), 3) == [Piece("d", True), Piece("ef", False)]
    assert pieces("abcdef", ((2, 4),), 0, 2) == [Piece("ab", False)]
    assert pieces("", ()) == []
