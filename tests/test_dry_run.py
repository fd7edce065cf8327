"""`ebft run --dry-run`: the plan and the estimates, and not a file more than before."""

from __future__ import annotations

from pathlib import Path

import pytest
from orchestration.builders import micro_config, micro_document, micro_file
from typer.testing import CliRunner

from ebft_core import estimates
from ebft_core.bench.cost_model import ModelCost, step_flops
from ebft_core.config import RunConfig, parse_config
from ebft_core.estimates import SHARE_OF_PEAK, estimate, step_shape
from ebft_core.manifests import commit_folder
from ebft_core.runs import plan_run
from flows.cli import app

PEAK = 1e9


@pytest.fixture(autouse=True)
def _known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "matrix_peak", lambda device, precision: PEAK)


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_it_shows_the_plan_and_leaves_nothing_behind(tmp_path: Path) -> None:
    run_file = micro_file(tmp_path)
    before = files(tmp_path)
    result = CliRunner().invoke(app, ["run", str(run_file), "--dry-run", "--set", "ebft.stride=7"])
    assert result.exit_code == 0, result.output
    assert files(tmp_path) == before
    assert "stride: 7" in result.output
    for stage in plan_run(micro_config(tmp_path)).stages:
        assert stage.name in result.output
    assert result.output.count("to do") == 6
    assert "estimated" in result.output
    assert "nothing was started or written" in result.output


def test_it_says_what_is_done_and_what_would_resume(tmp_path: Path) -> None:
    run_file = micro_file(tmp_path)
    plan = plan_run(micro_config(tmp_path))
    made = tmp_path / "made"
    made.mkdir()
    (made / "x").write_text("x", encoding="utf-8")
    meta = {"train": {"rows": 37}}
    commit_folder(made, plan.stage("tokenize").output, schema="ebft.tokenize/1", meta=meta)
    plan.stage("train").work.mkdir(parents=True)
    (plan.stage("train").work / "x").write_text("x", encoding="utf-8")
    output = CliRunner().invoke(app, ["run", str(run_file), "--dry-run"]).output
    states = {
        line.split("│")[1].strip(): line.split("│")[2].strip() for line in output.splitlines() if "│" in line
    }
    assert states["tokenize"] == "done"
    assert states["train"] == "resumes"
    assert states["merge"] == "to do"


def test_mistakes_are_those_of_a_run(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["run", str(micro_file(tmp_path)), "--dry-run", "--set", "ebft.stride=0"]
    )
    assert result.exit_code == 78


def epochs(folder: Path) -> RunConfig:
    document = micro_document(folder)
    document["trainer"] = {"num_train_epochs": 2, "micro_batch_size": 2, "device": "cpu"}
    return parse_config(document)


def test_steps_come_from_the_rows_or_from_the_size_of_the_files(tmp_path: Path) -> None:
    run = epochs(tmp_path)
    plan = plan_run(run)
    size = sum(p.stat().st_size for p in (tmp_path / "text").iterdir())
    rows = round(0.8 * size / 64)  # one byte per token, 64 tokens per row, 20 % held out
    guess = estimate(run, plan)
    assert guess.steps == -(-2 * rows // 2)
    assert any("from the size of the files" in text for text in guess.assumptions)
    made = tmp_path / "made"
    made.mkdir()
    (made / "x").write_text("x", encoding="utf-8")
    meta = {"train": {"rows": 37}}
    commit_folder(made, plan.stage("tokenize").output, schema="ebft.tokenize/1", meta=meta)
    known = estimate(run, plan)
    assert known.steps == 37
    assert not any("from the size of the files" in text for text in known.assumptions)


def test_time_is_the_cost_model_over_the_assumed_speed(tmp_path: Path) -> None:
    run = micro_config(tmp_path)
    found = estimate(run, plan_run(run))
    linear = 2 * (4 * 32 * 32 + 3 * 32 * 64)  # two layers of width 32, MLP 64
    cost = ModelCost(linear, 32 * 258, 2, trains_all=False)
    assert step_shape(run, 2, 4).anchors == len(range(8, 64 - 8 + 1, 8))
    step = step_flops(cost, step_shape(run, 2, 4), [0.5, 1.0])
    wanted = 4 * (step.rollout + step.features + step.update) / (SHARE_OF_PEAK * PEAK)
    assert found.seconds["train"] == pytest.approx(wanted)
    assert found.seconds["prepare_base"] == pytest.approx(
        6 * (linear + 32 * 258) * 6 * 4 * 64 / (SHARE_OF_PEAK * PEAK)
    )


def test_a_warm_start_takes_its_time_and_a_budget_is_what_it_says(tmp_path: Path) -> None:
    document = micro_document(tmp_path)
    document["trainer"] = {"max_seconds": 90.0, "micro_batch_size": 2, "device": "cpu"}
    without = parse_config(document)
    run = parse_config({**document, "sft": {"max_steps": 10, "batch_size": 8}})
    found = estimate(run, plan_run(run))
    linear = 2 * (4 * 32 * 32 + 3 * 32 * 64)
    assert found.steps is None
    assert found.seconds["train"] == 90.0
    assert found.seconds["sft"] == pytest.approx(
        6 * (linear + 32 * 258) * 10 * 8 * 64 / (SHARE_OF_PEAK * PEAK)
    )
    before = estimate(without, plan_run(without)).disk_bytes
    assert found.disk_bytes is not None
    assert before is not None
    assert found.disk_bytes > before


def test_full_fine_tuning_needs_masters_a_copy_and_the_optimiser(tmp_path: Path) -> None:
    lora = micro_config(tmp_path)
    full = lora.model_copy(update={"lora": None})
    parameters = 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32 + 32 * 258
    adapters = 2 * 4 * (4 * (32 + 32) + 3 * (32 + 64))
    difference = parameters * (4 + 4 + 12) - (4 * parameters + 16 * adapters)
    one, other = estimate(lora, plan_run(lora)).memory_bytes, estimate(full, plan_run(full)).memory_bytes
    assert one is not None
    assert other is not None
    assert other - one == difference


def test_a_model_that_is_not_here_has_no_estimate(tmp_path: Path) -> None:
    document = micro_document(tmp_path)
    document["model"] = {"name_or_path": "nobody/nothing-of-this-name"}
    run = parse_config(document)
    found = estimate(run, plan_run(run))
    assert (found.memory_bytes, found.disk_bytes, found.seconds) == (None, None, {})
    assert "not on this machine" in found.assumptions[0]
