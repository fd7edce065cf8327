"""`ebft compare` and `ebft sweep` for real: servers, stage programs, MLflow, on a model of two layers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from typer.testing import CliRunner

from ebft_core.comparison import ArmsComparison
from ebft_core.errors import ExitCode
from ebft_core.manifests import verify_folder
from ebft_core.runs import read_plan
from flows.cli import app
from orchestration.builders import micro_file
from orchestration.test_report import Tags
from tasks.comparison_report import read_comparison
from tasks.start_group import PARENT

pytestmark = [pytest.mark.service, pytest.mark.slow]

ARMS = ["sft", "ebft+ce"]


@dataclass(frozen=True)
class Finished:
    """A comparison that was interrupted once and has finished."""

    folder: Path
    config: Path
    interrupted: str
    output: list[dict[str, Any]]

    @property
    def result(self) -> dict[str, Any]:
        """The last line of `--json-logs`."""
        return self.output[-1]


def start(*arguments: str) -> subprocess.Popen[str]:
    private = {"PREFECT_API_URL", "MLFLOW_TRACKING_URI"}
    environment = {k: v for k, v in os.environ.items() if k not in private}
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "COLUMNS": "200"},
        start_new_session=True,
    )


def wait_until(condition: Callable[[], object], run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def lines(run: subprocess.Popen[str], code: int) -> list[dict[str, Any]]:
    output, errors = run.communicate(timeout=400)
    assert run.returncode == code, output + errors
    return [json.loads(line) for line in output.splitlines()]


def stages_said(output: list[dict[str, Any]], kind: str) -> list[str]:
    return [event["stage"] for event in output if event["kind"] == kind]


def groups(folder: Path) -> list[Path]:
    return [path.parent for path in (folder / "workspace" / "runs").glob("*/arms.json")]


def runs_in_mlflow(folder: Path) -> list[Run]:
    client = MlflowClient(f"sqlite:///{folder / 'workspace' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("ebft")
    return list(client.search_runs([experiment.experiment_id]))


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("compared")
    config = micro_file(folder)
    command = ["compare", str(config), "--arms", ",".join(ARMS), "--json-logs"]
    first = start(*command)
    trained = folder / "workspace" / "stages" / "sft"
    wait_until(lambda: any(trained.glob("*/manifest.json")), first)
    first.send_signal(signal.SIGINT)
    before = lines(first, ExitCode.PREEMPTED)
    return Finished(folder, config, before[-1]["text"], lines(start(*command), ExitCode.DONE))


def comparison_of(finished: Finished) -> ArmsComparison:
    return read_comparison(read_plan(Path(finished.result["run_dir"])))


def test_an_interrupted_comparison_says_how_to_go_on_and_repeats_nothing(compared: Finished) -> None:
    assert "--arms sft,ebft+ce --json-logs" in compared.interrupted
    skipped = stages_said(compared.output, "skipped")
    assert {"prepare_base", "tokenize", "sft · sft"} == set(skipped)
    started = stages_said(compared.output, "started")
    assert "ebft+ce · train" in started
    assert "sft · train" not in started  # the arm ends with its warm start
    assert started[-2:] == ["compare", "report"]


def test_all_arms_are_measured_on_the_same_rows(compared: Finished) -> None:
    comparison = comparison_of(compared)
    assert list(comparison.arms) == ARMS
    assert comparison.stages == {"sft": "sft", "ebft+ce": "merge"}
    assert len({(e.rows, e.documents, e.tokens, e.blocks) for e in comparison.arms.values()}) == 1
    for metric in ("cfm", "ce"):
        assert len({e.metrics[metric].base for e in comparison.arms.values()}) == 1
    best = comparison.best
    assert set(comparison.contrasts) == {"base", *ARMS} - {best}
    for name, contrast in comparison.contrasts.items():
        assert contrast["cfm"].tuned == pytest.approx(comparison.value(best, "cfm"), rel=1e-6)
        assert contrast["cfm"].base == pytest.approx(comparison.value(name, "cfm"), rel=1e-6)
    assert compared.result["comparison"] == comparison.to_json()
    assert compared.result["failed"] == {}
    assert comparison.answer.startswith(("Yes: ", "No: ", "Not determined: "))
    assert comparison.answer.endswith("after 4 optimiser steps.")


def test_mlflow_has_the_arms_below_one_parent_with_comparable_numbers(compared: Finished) -> None:
    comparison = comparison_of(compared)
    runs = runs_in_mlflow(compared.folder)
    (parent,) = [run for run in runs if run.data.tags.get("ebft.group") == "compare"]
    arms = {run.data.tags["ebft.arm"]: run for run in runs if run.data.tags.get("ebft.arm")}
    assert set(arms) == set(ARMS)
    assert {run.data.tags[PARENT] for run in arms.values()} == {parent.info.run_id}
    assert {run.info.status for run in runs} == {"FINISHED"}
    for name, run in arms.items():
        for key in ("cfm", "ce"):
            value = comparison.arms[name].metrics[key]
            assert run.data.metrics[f"tuned/{key}"] == pytest.approx(value.tuned)
            assert run.data.metrics[f"delta/{key}"] == pytest.approx(value.difference)
    assert parent.data.metrics["arms/ebft_ce/cfm"] == pytest.approx(comparison.value("ebft+ce", "cfm"))
    client = MlflowClient(f"sqlite:///{compared.folder / 'workspace' / 'mlflow.db'}")
    stored = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert {"report.html", "comparison.json", "config.yaml"} <= stored


def test_the_report_is_one_file_with_curves_and_samples_of_every_arm(compared: Finished) -> None:
    page = Path(compared.result["report"]).read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(page)
    assert (tags.open, tags.fetched) == ([], [])
    assert "script" not in tags.names
    assert "Samples side by side" in page
    (label,) = re.findall('aria-label="Cross-entropy: (.*?)"', page)
    assert sorted(label.split(", ")) == sorted(ARMS)
    for name in ARMS:
        assert f"<summary>{name}</summary>" in page
        assert f'<div class="dim">{name}</div>' in page
    assert "every arm: 4 optimiser steps" in page


def test_a_sweep_reports_its_failed_arm_and_trains_nothing_twice(compared: Finished) -> None:
    grid = "lora.target_modules=all-linear,nonsense"
    sweep = start("sweep", str(compared.config), "--grid", grid, "--parallel", "2", "--json-logs")
    output = lines(sweep, ExitCode.DONE)
    result = output[-1]
    assert list(result["failed"]) == ["target_modules=nonsense"]
    # The other one is the arm `ebft+ce` under another name: found by its key.
    assert "target_modules=all-linear · train" in stages_said(output, "skipped")
    plan = read_plan(Path(result["run_dir"]))
    assert verify_folder(plan.stages[-1].output) is not None
    assert list(read_comparison(plan).arms) == ["target_modules=all-linear"]
    assert "failed: " in Path(result["report"]).read_text(encoding="utf-8")
    assert len(groups(compared.folder)) == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["compare", "--arms", "base"], "nothing to compare"),
        (["compare", "--arm", "x:data.sequence_length=32"], "same rows"),
        (["sweep"], "nothing to vary"),
        (["sweep", "--grid", "ebft.ce_coef=0,-1"], "ebft.ce_coef"),
    ],
)
def test_mistakes_are_shown_before_anything_starts(tmp_path: Path, arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(app, [arguments[0], str(micro_file(tmp_path)), *arguments[1:]])
    assert result.exit_code == ExitCode.BAD_INPUT, result.output
    assert text in result.output
    assert not (tmp_path / "workspace" / "runs").exists()
