"""`ebft run` for real: Prefect server, stage programs, MLflow database, on a model of two layers.

One unbroken run is made once; the others share its finished first stages through copies of the workspace.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient
from safetensors.numpy import load_file

from ebft_core.config import load_config
from ebft_core.errors import ExitCode
from ebft_core.events import read_events
from ebft_core.manifests import verify_folder
from ebft_core.runs import STAGES, RunPlan, plan_run
from orchestration.builders import micro_file

pytestmark = [pytest.mark.service, pytest.mark.slow]

STEPS = 40
MINUTES = 5


@dataclass(frozen=True)
class Finished:
    """An unbroken run."""

    folder: Path
    config: Path
    plan: RunPlan
    output: str


def environment() -> dict[str, str]:
    private = {"PREFECT_API_URL", "MLFLOW_TRACKING_URI"}
    return {**{k: v for k, v in os.environ.items() if k not in private}, "COLUMNS": "150"}


def start(config: Path, *overrides: str) -> subprocess.Popen[str]:
    changes = [part for override in overrides for part in ("--set", override)]
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "run", str(config), *changes],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        start_new_session=True,
    )


def finish(run: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = run.communicate(timeout=60 * MINUTES)
    return run.returncode, output


def wait_until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def trained_steps(plan: RunPlan) -> list[int]:
    journal = read_events(plan.run_dir / "events" / "train.jsonl")
    return [event["step"] for event in journal if event["kind"] == "metrics"]


def family(run: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(run.pid).children(recursive=True)


def all_gone(processes: list[psutil.Process]) -> bool:
    return not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("unbroken")
    config = micro_file(folder, max_steps=STEPS)
    code, output = finish(start(config))
    assert code == ExitCode.DONE, output
    return Finished(folder, config, plan_run(load_config(config)), output)


def test_the_whole_pipeline(unbroken: Finished) -> None:
    plan = unbroken.plan
    assert all(verify_folder(stage.output) for stage in plan.stages)
    assert not any(stage.work.exists() for stage in plan.stages)
    assert {p.stem for p in (plan.run_dir / "stages").iterdir()} == set(STAGES)
    assert trained_steps(plan) == list(range(1, STEPS + 1))
    assert "difference" in unbroken.output
    assert "CFM (unbiased)" in unbroken.output
    assert f"ebft up --workspace {plan.workspace}" in unbroken.output
    assert "Traceback" not in unbroken.output
    assert "CFM (unbiased)" in (plan.run_dir / "report.html").read_text(encoding="utf-8")


def test_the_run_in_mlflow(unbroken: Finished) -> None:
    client = MlflowClient(f"sqlite:///{unbroken.plan.workspace}/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "ebft"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "ebft/cfm")
    assert sorted(m.step for m in history) == list(range(1, STEPS + 1))
    assert {"base/ce", "tuned/ce", "delta/ce"} <= set(run.data.metrics)
    assert {f.path for f in client.list_artifacts(run.info.run_id)} >= {"config.yaml", "report.html", "model"}
    version = client.get_model_version_by_alias("micro", "challenger")
    for name in ("config", "code", "data", "base"):
        assert version.tags[f"ebft.{name}_digest"] == run.data.tags[f"ebft.{name}_digest"]
    model = Path(version.source.removeprefix("file://"))
    merged = unbroken.plan.stage("merge").output / "model"
    assert (model / "model.safetensors").read_bytes() == (merged / "model.safetensors").read_bytes()


def test_a_second_start_skips_every_stage_and_registers_nothing(unbroken: Finished) -> None:
    before = {stage.name: verify_folder(stage.output) for stage in unbroken.plan.stages}
    code, output = finish(start(unbroken.config))
    assert code == ExitCode.DONE, output
    assert output.count("done already") == len(STAGES)
    assert {stage.name: verify_folder(stage.output) for stage in unbroken.plan.stages} == before
    client = MlflowClient(f"sqlite:///{unbroken.plan.workspace}/mlflow.db")
    assert len(client.search_model_versions("name = 'micro'")) == 1
    (experiment,) = [e for e in client.search_experiments() if e.name == "ebft"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert len(client.get_metric_history(run.info.run_id, "ebft/cfm")) == STEPS


def test_with_json_logs_standard_output_is_one_object_per_line(unbroken: Finished) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", str(unbroken.config), "--json-logs"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60 * MINUTES,
        check=False,
    )
    assert done.returncode == ExitCode.DONE, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    skipped = [line["stage"] for line in lines if line["kind"] == "skipped"]
    assert skipped == [stage.name for stage in unbroken.plan.stages]
    assert lines[-1]["kind"] == "result"
    assert lines[-1]["evaluation"]["metrics"]["cfm"]["label"] == "CFM (unbiased)"
    assert Path(lines[-1]["places"]["report"]).is_file()


def test_interrupted_and_killed_in_training_it_ends_with_the_same_weights(
    unbroken: Finished, tmp_path: Path
) -> None:
    workspace = tmp_path / "workspace"
    for stage in ("prepare_base", "tokenize"):
        shutil.copytree(unbroken.plan.workspace / "stages" / stage, workspace / "stages" / stage)
    moved = f"workspace={workspace}"
    plan = plan_run(load_config(unbroken.config, [moved]))
    assert plan.run_key == unbroken.plan.run_key

    first = start(unbroken.config, moved)
    wait_until(lambda: len(trained_steps(plan)) >= 2)
    relatives = family(first)
    first.send_signal(signal.SIGINT)
    code, output = finish(first)
    assert code == ExitCode.PREEMPTED, output
    assert f"ebft run {unbroken.config} --set {moved}" in output
    assert "Traceback" not in output
    assert all_gone(relatives)
    assert plan.stage("train").state == "partial"
    stopped_at = max(trained_steps(plan))
    assert stopped_at < STEPS, "the interrupt came too late to prove anything"

    second = start(unbroken.config, moved)
    wait_until(lambda: max(trained_steps(plan)) >= stopped_at + 3)
    relatives = family(second)
    for process in [psutil.Process(second.pid), *relatives]:
        process.kill()
    second.communicate()
    assert plan.stage("train").state == "partial", "the kill came too late to prove anything"

    killed_at = max(trained_steps(plan))
    third = start(unbroken.config, moved)
    wait_until(lambda: max(trained_steps(plan)) > killed_at or third.poll() is not None)
    for process in [p for p in family(third) if "train" in p.cmdline()]:
        process.kill()  # the flow tries the stage again, which goes on from the checkpoint
    code, output = finish(third)
    assert code == ExitCode.DONE, output
    assert output.count("train: started") == 2, output
    assert "killed by SIGKILL" in output
    for stage, name in (("train", "adapter/adapter_model.safetensors"), ("merge", "model/model.safetensors")):
        expected = load_file(unbroken.plan.stage(stage).output / name)
        found = load_file(plan.stage(stage).output / name)
        assert set(found) == set(expected)
        assert all((found[key] == expected[key]).all() for key in expected)
    client = MlflowClient(f"sqlite:///{workspace}/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "ebft"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "ebft/cfm")
    assert sorted(m.step for m in history) == list(range(1, STEPS + 1))


def test_when_only_the_parent_is_killed_nothing_stays_behind(tmp_path: Path) -> None:
    """The stage program and the Prefect server both notice."""
    config = micro_file(tmp_path)
    run = start(config, "model.from_scratch.max_steps=100000")
    plan = plan_run(load_config(config, ["model.from_scratch.max_steps=100000"]))
    wait_until(lambda: read_events(plan.run_dir / "events" / "prepare_base.jsonl"))
    relatives = family(run)
    assert len(relatives) >= 3
    run.kill()
    run.communicate()
    wait_until(lambda: all_gone(relatives), 60)


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("ebft.stride=0", "ebft.stride"),
        ("data.sources.0.path=/nowhere/*.txt", "no data files"),
        ("storage.reserve_gb=1000000", "the disk is too small"),
        ("tokenizer.kind=x", "tokenizer"),
    ],
)
def test_bad_input_is_one_error_and_leaves_nothing(tmp_path: Path, override: str, what: str) -> None:
    config = micro_file(tmp_path)
    code, output = finish(start(config, override))
    assert code == ExitCode.BAD_INPUT
    assert what in output
    assert output.count("error:") == 1
    assert "Traceback" not in output
    assert not (tmp_path / "workspace" / "runs").exists()
    assert not (tmp_path / "workspace" / "stages").exists()


def test_a_stage_that_refuses_shows_its_error_once_and_is_not_tried_again(tmp_path: Path) -> None:
    """Documents too short for one anchor: only the tokenized text can tell."""
    config = micro_file(tmp_path)
    short = tmp_path / "short"
    short.mkdir()
    for number in range(6):
        (short / f"{number}.txt").write_text(f"text {number}", encoding="utf-8")
    code, output = finish(start(config, f"data.sources.0.path={short}/*.txt"))
    assert code == ExitCode.BAD_INPUT, output
    assert output.count("error:") == 1, output
    assert output.count("tokenize: started") == 1
    assert "Traceback" not in output
