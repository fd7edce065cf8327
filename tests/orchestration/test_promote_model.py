"""From measured numbers to a moved alias, with a real Prefect server, a registry and a form to fill in."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.client.schemas.objects import FlowRun
from prefect.testing.utilities import prefect_test_harness

from ebft_core.bootstrap import PairedEstimate
from ebft_core.config import parse_config
from ebft_core.errors import UserError
from ebft_core.evaluation.summary import Evaluation, Reference
from ebft_core.manifests import commit_folder, write_json_atomic
from ebft_core.runs import plan_run, write_run_folder
from orchestration.builders import micro_document
from orchestration.registered import local_store, register
from tasks import approval
from tasks.promote_model import promote_model
from tasks.registered_model import DECIDED_BY, DECISION, REASON
from tasks.registry import Registry

pytestmark = pytest.mark.service


@pytest.fixture(scope="module", autouse=True)
def prefect() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=60):
        yield


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return local_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approval, "_LOOK_EVERY_SECONDS", 0.2)


@dataclass(frozen=True)
class Published:
    """A run that evaluated and published its model."""

    folder: Path
    published: dict[str, Any]
    evaluation: dict[str, Any]
    registry: Registry
    version: str

    def promote(self, name: str, *, champion: str | None = None) -> dict[str, Any]:
        references = {"base": None} if champion is None else {"base": None, "champion": "last week"}

        @flow(name=name, flow_run_name=name)
        def promotion() -> dict[str, Any]:
            return promote_model(
                str(self.folder),
                self.published,
                self.evaluation,
                references,
                self.registry.uri,
                champion=champion,
            )

        return promotion()


def estimate(low: float, high: float) -> PairedEstimate:
    middle = (low + high) / 2
    return PairedEstimate(1.0, 1.0 + middle, middle, 0.01, (low, high), (0.9, 1.1), (0.9, 1.1), 20)


BETTER = {"cfm": estimate(-0.3, -0.1), "ce": estimate(-0.1, 0.01), "duplicate_rate": estimate(0.0, 0.0)}
WORSE = {**BETTER, "cfm": estimate(0.1, 0.3)}


def published_run(
    folder: Path, registry: Registry, against: dict[str, PairedEstimate] | None = None, **promotion: Any
) -> Published:
    """A run better than its base, and compared with last week's champion if `against` is given."""
    config = parse_config({**micro_document(folder), "promotion": promotion})
    plan = plan_run(config)
    write_run_folder(plan, config)
    version = register(registry.uri, registry.name, "challenger")
    references = {} if against is None else {"last week": Reference("old", against)}
    counts = {"rows": 9, "documents": 9, "tokens": 9, "blocks": 9, "dropped_base": 0, "dropped_tuned": 0}
    settings = {"n_samples": 4, "seed": 0, "confidence": 0.95, "bootstrap_samples": 50}
    measured = Evaluation("b", "t", **counts, **settings, metrics=BETTER, against=references)
    staged = folder / "staged"
    staged.mkdir()
    write_json_atomic(staged / "evaluation.json", measured.to_json())
    write_json_atomic(staged / "rollouts.json", {"schema": "ebft.rollouts/1", "rollouts": []})
    evaluation = commit_folder(staged, plan.stage("evaluate").output, schema="ebft.evaluate/1", meta={})
    staged.mkdir()
    model = registry.version(version)
    meta = {"name": model.name, "version": version, "alias": "challenger"}
    meta |= {"run_id": model.run_id, "source": model.source}
    published = commit_folder(staged, plan.stage("publish").output, schema="ebft.publish/1", meta=meta)
    return Published(plan.run_dir, published.to_json(), evaluation.to_json(), registry, version)


@pytest.fixture
def registry(uri: str) -> Registry:
    """A registered model's name of its own."""
    return Registry(uri, uuid.uuid4().hex)


def test_better_than_the_base_makes_the_first_champion(tmp_path: Path, registry: Registry) -> None:
    run = published_run(tmp_path, registry)
    document = run.promote("first")
    assert document["promote"]
    champion = registry.champion()
    assert champion.version == run.version
    assert champion.tags[DECISION] == "promoted"
    assert champion.tags["ebft.gate.cfm.base"].startswith("CFM (unbiased), challenger minus base: -0.2000")
    assert json.loads((run.folder / "decision.json").read_text())["reason"] == document["reason"]
    report = (run.folder / "report.html").read_text(encoding="utf-8")
    assert document["reason"] in report
    client = MlflowClient(registry.uri)
    assert {file.path for file in client.list_artifacts(champion.run_id)} >= {"decision.json", "report.html"}
    assert client.get_run(champion.run_id).data.tags[REASON] == document["reason"]
    with get_client(sync_client=True) as prefect:
        (table,) = [a for a in prefect.read_artifacts() if a.key == "ebft-promote"]
        (text,) = [a for a in prefect.read_artifacts() if a.key == "ebft-promote-decision"]
    assert document["reason"] in table.description
    assert document["reason"] in text.data


def test_worse_than_the_champion_is_refused_and_says_so(tmp_path: Path, registry: Registry) -> None:
    old = register(registry.uri, registry.name, "champion")
    run = published_run(tmp_path, registry, WORSE)
    registry.promote(old, None, by="me")
    document = run.promote("worse", champion=old)
    assert not document["promote"]
    assert registry.champion().version == old
    refused = registry.version(run.version)
    assert refused.tags[DECISION] == "refused"
    assert "challenger minus champion: +0.2000" in refused.tags[REASON]
    assert refused.tags[REASON] in (run.folder / "report.html").read_text(encoding="utf-8")


def test_a_champion_that_was_not_compared_is_never_replaced(tmp_path: Path, registry: Registry) -> None:
    old = register(registry.uri, registry.name, "champion")
    run = published_run(tmp_path, registry)
    registry.promote(old, None, by="me")
    with pytest.raises(UserError, match="the champion has changed"):
        run.promote("unseen")
    assert registry.champion().version == old
    assert not (run.folder / "decision.json").exists()


def paused(name: str) -> FlowRun:
    """The paused flow run of that name, once there is one."""
    wanted = FlowRunFilter(name=FlowRunFilterName(any_=[name]))

    def found() -> FlowRun | None:
        with get_client(sync_client=True) as client:
            runs = client.read_flow_runs(flow_run_filter=wanted)
        return next((run for run in runs if run.state.is_paused()), None)

    return wait_for(found)


def wait_for(look: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while (found := look()) is None:
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
    return found


@pytest.mark.parametrize("approve", [True, False])
def test_a_person_has_the_last_word(tmp_path: Path, registry: Registry, approve: bool) -> None:
    run = published_run(tmp_path, registry, require_approval=True)
    name = f"asks {approve}"
    documents: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: documents.append(run.promote(name)))
    thread.start()
    waiting = paused(name)
    assert registry.champion() is None
    with get_client(sync_client=True) as client:
        nothing = client.resume_flow_run(waiting.id)  # without the form
        assert nothing.status.value == "REJECT"
        answer = {"approve": approve, "by": "Ada", "comment": "read the samples"}
        client.resume_flow_run(waiting.id, run_input=answer)
    thread.join(240)
    (document,) = documents
    assert document["promote"] == approve
    assert "Ada: read the samples" in document["reason"]
    noted = registry.version(run.version)
    assert noted.tags[DECIDED_BY] == "Ada"
    assert noted.aliases == (("champion",) if approve else ())


def test_no_answer_in_time_refuses_and_the_flow_ends_well(tmp_path: Path, registry: Registry) -> None:
    run = published_run(tmp_path, registry, require_approval=True, approval_timeout_hours=0.0005)
    document = run.promote("nobody there")
    assert not document["promote"]
    assert "nobody approved it within 0.0005 hours" in document["reason"]
    assert registry.champion() is None
    with get_client(sync_client=True) as client:
        wanted = FlowRunFilter(name=FlowRunFilterName(any_=["nobody there"]))
        (done,) = client.read_flow_runs(flow_run_filter=wanted)
    assert done.state.is_completed()
