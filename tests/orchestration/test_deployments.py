"""`ebft up`, `prefect deployment run ebft/strided` and cancelling, with real servers and a real worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import psutil
import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
)
from prefect.settings import PREFECT_API_URL, temporary_settings

from ebft_core.config import load_config
from ebft_core.errors import ExitCode
from ebft_core.events import read_events
from ebft_core.manifests import verify_folder
from ebft_core.runs import STAGES, plan_run
from orchestration.builders import micro_file
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
    assert set(found) == {"strided", "structured", "structured-async", "weekly"}
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


def test_the_deployment_runs_the_whole_pipeline(up: Up, client: SyncPrefectClient, tmp_path: Path) -> None:
    config = micro_file(up.workspace.parent)
    flow_run = run_strided(up, config)
    wait_until(lambda: state_of(client, flow_run).is_final())
    assert state_of(client, flow_run).is_completed(), state_of(client, flow_run).message
    plan = plan_run(load_config(config))
    assert all(verify_folder(stage.output) for stage in plan.stages)
    tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run])))
    assert {task.name for task in tasks} == {*STAGES, "report"}
    assert all({"ebft", f"stage:{task.name}"} <= set(task.tags) for task in tasks if task.name != "report")
    artifacts = client.read_artifacts(
        artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run]))
    )
    kinds = {artifact.key: artifact.type for artifact in artifacts}
    assert kinds["ebft-train-progress"] == "progress"
    assert kinds["ebft-evaluate-comparison"] == "table"
    assert kinds["ebft-report"] == "markdown"
    assert [a.data for a in artifacts if a.key == "ebft-train-progress"] == [100.0]
    mlflow = MlflowClient(up.mlflow)
    experiment = mlflow.get_experiment_by_name("ebft")
    (run,) = mlflow.search_runs([experiment.experiment_id], f"tags.`ebft.run_key` = '{plan.run_key}'")
    assert run.info.status == "FINISHED"
    assert run.data.tags["prefect.flow_run"] == str(flow_run)


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
    mlflow = MlflowClient(up.mlflow)
    experiment = mlflow.get_experiment_by_name("ebft")
    (run,) = mlflow.search_runs([experiment.experiment_id], f"tags.`ebft.run_key` = '{plan.run_key}'")
    wait_until(lambda: mlflow.get_run(run.info.run_id).info.status == "KILLED", 30)


def stage_programs(run_dir: Path) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if str(run_dir) in (process.info["cmdline"] or []) and process.info["status"] != "zombie":
            found.append(process.pid)
    return found
