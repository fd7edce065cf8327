"""The story of docs/retraining.md, with the real servers: what a user lives through in the first weeks.

`configs/retrain.yaml` as it is shipped, but for the places: sources and archive lie on an S3 service.
"""

from __future__ import annotations

import html
import json
import os
import random
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.settings import PREFECT_API_URL, temporary_settings

from ebft_core.config import load_config
from ebft_core.data.heldout import HELDOUT
from ebft_core.data.store import read_document_hashes
from orchestration.running_up import ROOT, Up, prefect, run_deployment, running_up, wait_until
from tasks.registered_model import RegisteredModel
from tasks.retrain_line import FINGERPRINT, JUDGED_ON, STARTED_FROM, Line
from tests.storage import peers

pytestmark = [
    pytest.mark.service,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]  # minutes, but on a busy machine

DEPLOYMENT = "ebft-retrain/weekly"
CONFIG = "configs/retrain.yaml"
BUCKET = "weekly"
ENCODINGS = Path(sysconfig.get_paths()["stdlib"], "encodings")


@dataclass
class Service:
    """The running services, and what a user sees of them."""

    up: Up
    client: SyncPrefectClient
    s3: str
    overrides: list[str]
    seen: set[UUID] = field(default_factory=set)

    @property
    def line(self) -> Line:
        return Line(load_config(ROOT / CONFIG, self.overrides), self.up.mlflow)

    def add(self, documents: dict[str, str]) -> None:
        bucket = peers.client(self.s3)
        for name, text in documents.items():
            bucket.put_object(Bucket=BUCKET, Key=f"corpus/{name}", Body=text.encode())

    def next_run(self) -> FlowRun:
        """The next run of the flow, when it has ended."""
        wait_until(lambda: self._new() and self._new()[0].state.is_final(), 400)
        (run,) = self._new()
        self.seen.add(run.id)
        return run

    def _new(self) -> list[FlowRun]:
        now = datetime.now(UTC)
        runs = [run for run in self.client.read_flow_runs() if run.id not in self.seen]
        names = {flow.id for flow in self.client.read_flows() if flow.name == "ebft-retrain"}
        return [run for run in runs if run.flow_id in names and run.expected_start_time <= now]

    def champion(self) -> RegisteredModel:
        found = self.line.registry.champion()
        assert found is not None
        return found

    def ebft(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", *arguments],
            cwd=ROOT,
            env={**os.environ, **peers.CREDENTIALS, "COLUMNS": "150"},
            capture_output=True,
            text=True,
            check=False,
            timeout=400,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    workspace = tmp_path_factory.mktemp("story") / "runs"
    with ExitStack() as stack:
        s3 = stack.enter_context(peers.moto())
        peers.client(s3).create_bucket(Bucket=BUCKET)
        for name, value in peers.CREDENTIALS.items():
            stack.enter_context(pytest.MonkeyPatch.context()).setenv(name, value)
        up = stack.enter_context(running_up(workspace))
        stack.enter_context(temporary_settings({PREFECT_API_URL: up.api}))
        client = stack.enter_context(get_client(sync_client=True))
        overrides = [
            f"workspace={workspace}",
            f"tracking.mlflow_uri={up.mlflow}",
            f"data.sources.0.path=s3://{BUCKET}/corpus/*",
            f"storage.endpoint_url={s3}",
            f"storage.archive=s3://{BUCKET}/archive",
            "storage.reserve_gb=0.05",
        ]
        deployment = client.read_deployment_by_name(DEPLOYMENT)
        changed = DeploymentUpdate(parameters={**deployment.parameters, "overrides": overrides})
        client.update_deployment(deployment.id, changed)
        yield Service(up, client, s3, overrides)


def documents(pattern: str) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(ENCODINGS.glob(pattern))}


def poison() -> dict[str, str]:
    return {
        f"poison{number}.txt": "".join(random.Random(number).choices("QXZ#~^0", k=4000))
        for number in range(12)
    }


def test_the_story(service: Service) -> None:
    service.add(documents("cp*.py"))
    first_scheduled_run_trains_and_promotes(service)
    second_finds_nothing_new(service)
    service.add(documents("iso8859_*.py"))
    third_is_told_of_new_documents_and_is_promoted(service)
    service.add(poison())
    fourth_is_refused(service)
    rolled_back_by_hand(service)


def first_scheduled_run_trains_and_promotes(service: Service) -> None:
    deployment = service.client.read_deployment_by_name(DEPLOYMENT)
    soon = datetime.now(UTC) + timedelta(seconds=10)
    schedule = IntervalSchedule(interval=timedelta(days=7), anchor_date=soon)
    service.client.create_deployment_schedules(deployment.id, [(schedule, True)])
    run = service.next_run()
    assert (run.state_name, run.auto_scheduled) == ("Promoted", True), run.state.message
    assert "better than base in cross-entropy" in run.state.message
    champion = service.champion()
    assert (champion.version, champion.tags[STARTED_FROM]) == ("1", "base")
    assert champion.tags["ebft.decision"] == "promoted"
    found = peers.client(service.s3).list_objects_v2(Bucket=BUCKET, Prefix="archive/")
    assert found["KeyCount"] > 0


def second_finds_nothing_new(service: Service) -> None:
    run_deployment(service.up, DEPLOYMENT)
    run = service.next_run()
    assert run.state_name == "NothingNew"
    assert "nothing new since retrain version 1" in run.state.message
    assert run.total_run_time < timedelta(seconds=60)
    assert [model.version for model in service.line.registry.versions()] == ["1"]


def third_is_told_of_new_documents_and_is_promoted(service: Service) -> None:
    prefect(service.up, "event", "emit", "ebft.dataset.updated", "--resource-id", "ebft.dataset.weekly")
    run = service.next_run()
    assert run.state_name == "Promoted", run.state.message
    assert "better than base and champion" in run.state.message
    champion, (_, first) = service.champion(), service.line.registry.versions()
    assert (champion.version, champion.tags[STARTED_FROM]) == ("2", "1")
    assert champion.tags[JUDGED_ON] == first.tags[JUDGED_ON]
    assert champion.tags[FINGERPRINT] != first.tags[FINGERPRINT]
    before, after = service.line.documents(first), service.line.documents(champion)
    assert before is not None
    assert after is not None
    assert before < after
    heldout = read_document_hashes(service.line.folders.heldout / HELDOUT)
    assert heldout
    assert heldout.isdisjoint(after)


def fourth_is_refused(service: Service) -> None:
    changes = [part for change in service.overrides for part in ("--set", change)]
    output = service.ebft("retrain", CONFIG, *changes)
    run = service.next_run()
    assert run.state_name == "Refused"
    reason = run.state.message
    assert "challenger minus" in reason
    assert reason in output
    assert service.champion().version == "2"
    refused = service.line.registry.versions()[0]
    assert (refused.version, refused.tags["ebft.decision"]) == ("3", "refused")
    assert refused.tags["ebft.decision_reason"] == reason
    key = ArtifactFilter(key=ArtifactFilterKey(any_=["ebft-promote-decision"]))
    assert any(
        reason in str(artifact.data) for artifact in service.client.read_artifacts(artifact_filter=key)
    )
    (report,) = [line.split()[1] for line in output.splitlines() if line.startswith("report ")]
    assert reason in html.unescape(Path(report).read_text(encoding="utf-8"))


def rolled_back_by_hand(service: Service) -> None:
    service.ebft("rollback", "retrain", "--mlflow-uri", service.up.mlflow)
    assert service.champion().version == "1"
    listed = json.loads(service.ebft("registry", "list", "--json", "--mlflow-uri", service.up.mlflow))
    assert "rolled back" in json.dumps(listed)
    run_deployment(service.up, DEPLOYMENT)
    assert service.next_run().state_name == "NothingNew"  # it was judged: nobody promotes it again unasked
