"""`ebft up`, `prefect deployment run ebft/strided` and cancelling, with real servers and a real worker."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import psutil
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
)
from prefect.client.schemas.objects import Artifact
from prefect.settings import PREFECT_API_URL, temporary_settings

from ebft_core.config import load_config
from ebft_core.errors import ExitCode
from ebft_core.events import read_events
from ebft_core.manifests import verify_folder
from ebft_core.runs import STAGES, RunPlan, plan_run
from orchestration.builders import micro_file
from orchestration.pages import needs_browser, shown_text
from orchestration.running_up import Up, prefect, run_deployment, running_up, start_up, state_of, wait_until
from tasks.accelerator_slot import SLOT
from tasks.services import answers, free_port

pytestmark = [pytest.mark.service, pytest.mark.slow]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with running_up(tmp_path_factory.mktemp("up") / "workspace") as services:
        yield services


@pytest.fixture
def client(up: Up) -> Iterator[SyncPrefectClient]:
    with temporary_settings({PREFECT_API_URL: up.api}), get_client(sync_client=True) as client:
        yield client


def run_strided(up: Up, config: Path, overrides: str = "[]") -> UUID:
    return run_deployment(up, "ebft/strided", f"config={config}", f"overrides={overrides}")


def test_the_servers_answer(up: Up) -> None:
    assert answers(f"{up.api}/health")
    assert answers(up.mlflow)
    assert answers(up.api.removesuffix("/api"))


def test_every_deployment_and_the_slot_are_there(up: Up, client: SyncPrefectClient) -> None:
    found = {deployment.name: deployment for deployment in client.read_deployments()}
    assert set(found) == {"strided", "structured", "structured-async", "weekly", "arms", "grid"}
    assert {d.work_pool_name for d in found.values()} == {"ebft-process"}
    assert found["structured-async"].parameters["overrides"] == ["rollout.prefetch_depth=1"]
    assert client.read_global_concurrency_limit_by_name(SLOT).limit == 1


def test_a_taken_port_is_an_error_of_the_users(up: Up, tmp_path: Path) -> None:
    taken = int(up.mlflow.rsplit(":", 1)[1])
    second = start_up(tmp_path / "workspace", free_port(), taken)
    output, _ = second.communicate(timeout=60)
    assert second.returncode == ExitCode.BAD_INPUT
    assert "the port is taken" in output
    assert "--mlflow-port" in output


@dataclass(frozen=True)
class Finished:
    """A run of the deployment, in Prefect and in MLflow."""

    flow_run: UUID
    plan: RunPlan
    mlflow: Run


@pytest.fixture(scope="module")
def finished(up: Up) -> Finished:
    config = micro_file(up.workspace.parent)
    flow_run = run_strided(up, config)
    with temporary_settings({PREFECT_API_URL: up.api}), get_client(sync_client=True) as client:
        wait_until(lambda: state_of(client, flow_run).is_final())
        assert state_of(client, flow_run).is_completed(), state_of(client, flow_run).message
    plan = plan_run(load_config(config))
    return Finished(flow_run, plan, run_in_mlflow(up, plan))


def run_in_mlflow(up: Up, plan: RunPlan) -> Run:
    mlflow = MlflowClient(up.mlflow)
    experiment = mlflow.get_experiment_by_name("ebft")
    (run,) = mlflow.search_runs([experiment.experiment_id], f"tags.`ebft.run_key` = '{plan.run_key}'")
    return run


def artifacts_of(client: SyncPrefectClient, finished: Finished) -> list[Artifact]:
    of_run = ArtifactFilterFlowRunId(any_=[finished.flow_run])
    return client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=of_run))


def test_the_deployment_runs_the_whole_pipeline(finished: Finished, client: SyncPrefectClient) -> None:
    assert all(verify_folder(stage.output) for stage in finished.plan.stages)
    only = FlowRunFilter(id=FlowRunFilterId(any_=[finished.flow_run]))
    tasks = client.read_task_runs(flow_run_filter=only)
    assert {task.name for task in tasks} == {*STAGES, "report"}
    assert all({"ebft", f"stage:{task.name}"} <= set(task.tags) for task in tasks if task.name != "report")
    artifacts = artifacts_of(client, finished)
    kinds = {artifact.key: artifact.type for artifact in artifacts}
    assert kinds["ebft-train-progress"] == "progress"
    assert kinds["ebft-evaluate-comparison"] == "table"
    assert kinds["ebft-report"] == "markdown"
    assert [a.data for a in artifacts if a.key == "ebft-train-progress"] == [100.0]
    assert finished.mlflow.info.status == "FINISHED"
    assert finished.mlflow.data.tags["prefect.flow_run"] == str(finished.flow_run)


def test_names_and_the_short_report_say_what_the_run_is(
    up: Up, finished: Finished, client: SyncPrefectClient
) -> None:
    assert re.fullmatch(r"micro \d{4}-\d\d-\d\d \d\d:\d\d", client.read_flow_run(finished.flow_run).name)
    (report,) = [a.data for a in artifacts_of(client, finished) if a.key == "ebft-report"]
    info = finished.mlflow.info
    assert "| CFM (unbiased) |" in report
    page = f"{up.mlflow}/#/experiments/{info.experiment_id}/runs/{info.run_id}"
    assert f"[its artifacts]({page}/artifacts?workflowType=machine_learning)" in report
    assert "registered: `micro` version 1, alias `challenger`" in report
    assert finished.mlflow.data.tags["mlflow.note.content"] == report


def test_mlflow_has_groups_of_metrics_the_data_and_a_version_with_its_origin(
    up: Up, finished: Finished
) -> None:
    mlflow = MlflowClient(up.mlflow)
    run, plan = finished.mlflow, finished.plan
    groups = {"ebft", "train", "perf", "rollout", "prepare_base", "base", "tuned", "delta"}
    assert {name.split("/")[0] for name in run.data.metrics} == groups
    (data,) = run.inputs.dataset_inputs
    assert plan.data_digest.startswith(data.dataset.digest)
    assert {"config.yaml", "report.html", "evaluation.json", "model"} <= {
        file.path for file in mlflow.list_artifacts(run.info.run_id)
    }
    version = mlflow.get_model_version_by_alias("micro", "challenger")
    assert version.run_id == run.info.run_id
    assert version.tags["ebft.data_digest"] == plan.data_digest
    experiment = mlflow.get_experiment(run.info.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


@needs_browser
def test_prefect_s_pages_show_the_run_its_metrics_and_the_links(
    up: Up, finished: Finished, client: SyncPrefectClient
) -> None:
    site = up.api.removesuffix("/api")
    run = shown_text(f"{site}/runs/flow-run/{finished.flow_run}")
    assert client.read_flow_run(finished.flow_run).name in run
    assert "Completed" in run
    assert "train: load model" in run  # a line of a stage's log
    by_key = {artifact.key: artifact.id for artifact in artifacts_of(client, finished)}
    comparison = shown_text(f"{site}/artifacts/artifact/{by_key['ebft-evaluate-comparison']}")
    assert "CFM (unbiased)" in comparison
    report = shown_text(f"{site}/artifacts/artifact/{by_key['ebft-report']}")
    assert "Held-out evaluation" in report
    assert "the run in MLflow" in report


@needs_browser
def test_mlflow_s_pages_show_the_run_its_metrics_and_artifacts(up: Up, finished: Finished) -> None:
    info = finished.mlflow.info
    page = f"{up.mlflow}/#/experiments/{info.experiment_id}/runs/{info.run_id}"
    overview = shown_text(f"{page}?workflowType=machine_learning")
    for text in (
        finished.plan.run_dir.name,
        "ebft/cfm",
        "tuned/ce",
        "Held-out evaluation",
        "ebft.data_digest",
    ):
        assert text in overview
    artifacts = shown_text(f"{page}/artifacts")
    for text in ("report.html", "evaluation.json", "model"):
        assert text in artifacts
    version = shown_text(f"{up.mlflow}/#/models/micro/versions/1")
    assert "challenger" in version
    assert "ebft.model_digest" in version


def test_cancelling_leaves_a_checkpoint_and_no_process(up: Up, client: SyncPrefectClient) -> None:
    config = micro_file(up.workspace.parent)
    flow_run = run_strided(up, config, '["trainer.max_steps=100000"]')
    plan = plan_run(load_config(config, ["trainer.max_steps=100000"]))
    journal = plan.run_dir / "events" / "train.jsonl"
    wait_until(lambda: sum(e["kind"] == "metrics" for e in read_events(journal)) >= 3)
    assert stage_programs(plan.run_dir)
    prefect(up, "flow-run", "cancel", str(flow_run))
    wait_until(lambda: state_of(client, flow_run).is_final(), 90)
    assert state_of(client, flow_run).is_cancelled()
    wait_until(lambda: not stage_programs(plan.run_dir), 60)
    assert plan.stage("train").state == "partial"
    manifests = list(plan.stage("train").work.rglob("manifest.json"))
    assert any(verify_folder(manifest.parent) for manifest in manifests)
    assert "stopped" in str(read_events(journal)[-1])
    run, mlflow = run_in_mlflow(up, plan), MlflowClient(up.mlflow)
    wait_until(lambda: mlflow.get_run(run.info.run_id).info.status == "KILLED", 30)


def stage_programs(run_dir: Path) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if str(run_dir) in (process.info["cmdline"] or []) and process.info["status"] != "zombie":
            found.append(process.pid)
    return found
