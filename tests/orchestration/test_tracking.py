"""MLflow gets every value once, whatever happens to it and to us. A real server, stopped and started."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import requests
from mlflow import MlflowClient

from ebft_core.config import RunConfig, parse_config
from ebft_core.errors import UserError
from ebft_core.events import EventWriter
from ebft_core.runs import RunPlan, plan_run, write_run_folder
from orchestration.builders import micro_config, micro_document
from tasks import journal_sync
from tasks.mlflow_store import MlflowStore, Point
from tasks.mlflow_uri import tracking_uri
from tasks.services import Service, free_port, mlflow_server
from tasks.supervise import StageFailed, StagePreempted
from tasks.tracking import tracked_run, wait_for_run_id

TRACK_FOR_EVER = """
import pathlib, sys, time
from ebft_core.config import load_config
from ebft_core.runs import read_plan
from tasks.tracking import tracked_run
folder = pathlib.Path(sys.argv[1])
with tracked_run(read_plan(folder), load_config(folder / "config.yaml"), sys.argv[2]):
    time.sleep(600)
"""


class Server:
    """A real MLflow server on one port that can be stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.service: Service | None = None

    def start(self) -> None:
        self.service = mlflow_server(self.folder, self.port)
        self.service.start()
        self.service.wait_ready()

    def stop(self) -> None:
        if self.service is not None:
            self.service.stop()
            self.service = None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("mlflow"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunPlan, RunConfig]:
    config = micro_config(tmp_path)
    plan = plan_run(config)
    write_run_folder(plan, config)
    return plan, config


@pytest.fixture(autouse=True)
def quick_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    monkeypatch.setattr(journal_sync, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(journal_sync, "_BACKOFF_SECONDS", (0.2,))


def history(uri: str, run_id: str | None, name: str) -> list[tuple[int, float]]:
    assert run_id is not None
    return sorted((m.step, m.value) for m in MlflowClient(uri).get_metric_history(run_id, name))


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def write_steps(plan: RunPlan, steps: range, stage: str = "train") -> None:
    events = EventWriter(plan.run_dir / "events" / f"{stage}.jsonl", stage)
    for step in steps:
        events.metrics(step, {"ebft/reward": step / 10, "ebft/cfm": 1 / step}, total=100)


def complete(steps: int) -> list[tuple[int, float]]:
    return [(step, step / 10) for step in range(1, steps + 1)]


@pytest.mark.service
def test_no_gap_and_no_duplicate_when_the_server_goes_away_in_the_middle(
    server: Server, run: tuple[RunPlan, RunConfig]
) -> None:
    plan, config = run
    with tracked_run(plan, config, server.uri) as sync:
        write_steps(plan, range(1, 11))
        wait_until(lambda: sync.run_id and len(history(server.uri, sync.run_id, "ebft/reward")) == 10)
        server.stop()
        try:
            write_steps(plan, range(11, 21))
            wait_until(lambda: sync.last_error)
            write_steps(plan, range(21, 31))
        finally:
            server.start()
        write_steps(plan, range(31, 41))
    assert history(server.uri, sync.run_id, "ebft/reward") == complete(40)
    assert MlflowClient(server.uri).get_run(sync.run_id).info.status == "FINISHED"


@pytest.mark.service
def test_a_run_started_while_mlflow_is_away_is_sent_by_the_next_start(
    server: Server, run: tuple[RunPlan, RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, config = run
    monkeypatch.setattr("tasks.tracking.FINISH_SECONDS", 0.5)
    nobody = f"http://127.0.0.1:{free_port()}"
    with tracked_run(plan, config, nobody) as sync:
        write_steps(plan, range(1, 6))
    assert sync.run_id is None
    monkeypatch.setattr("tasks.tracking.FINISH_SECONDS", 60.0)
    with tracked_run(plan, config, server.uri) as sync:
        pass
    assert history(server.uri, sync.run_id, "ebft/reward") == complete(5)


@pytest.mark.service
def test_a_call_that_fails_after_it_was_carried_out_is_not_repeated(
    server: Server, run: tuple[RunPlan, RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, config = run
    log_points = MlflowStore.log_points
    answers_lost = 0

    def lose_every_other_answer(store: MlflowStore, run_id: str, points: Sequence[Point]) -> None:
        nonlocal answers_lost
        later = [Point(p.key, p.value, p.step, p.time_ms + answers_lost) for p in points]
        log_points(store, run_id, later)  # another time, so that the database cannot see that rows repeat
        answers_lost += 1
        if answers_lost % 2:
            raise requests.ConnectionError("the answer was lost")

    monkeypatch.setattr(MlflowStore, "log_points", lose_every_other_answer)
    with tracked_run(plan, config, server.uri) as sync:
        for first in range(1, 21, 5):
            write_steps(plan, range(first, first + 5))
            wait_until(lambda: sync.run_id and len(history(server.uri, sync.run_id, "ebft/cfm")) >= first + 4)  # noqa: B023
    assert answers_lost >= 2
    assert history(server.uri, sync.run_id, "ebft/reward") == complete(20)


@pytest.mark.service
def test_crash_and_resume_reopen_the_run_and_log_repeated_steps_once(
    server: Server, run: tuple[RunPlan, RunConfig]
) -> None:
    """The first process is killed; the resumed stage repeats the steps since its checkpoint."""
    plan, config = run
    crashed = subprocess.Popen([sys.executable, "-c", TRACK_FOR_EVER, str(plan.run_dir), server.uri])
    write_steps(plan, range(1, 8))
    run_id = wait_for_run_id(plan.run_dir, 60)
    wait_until(lambda: len(history(server.uri, run_id, "ebft/cfm")) == 7)
    crashed.kill()
    crashed.wait()
    assert MlflowClient(server.uri).get_run(run_id).info.status == "RUNNING"
    write_steps(plan, range(5, 13))
    with tracked_run(plan, config, server.uri) as sync:
        write_steps(plan, range(13, 15))
    assert sync.run_id == run_id
    assert history(server.uri, sync.run_id, "ebft/reward") == complete(14)
    assert MlflowClient(server.uri).get_run(sync.run_id).info.status == "FINISHED"


@pytest.mark.service
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StageFailed("train", 70, "x", Path("log")), "FAILED"),
        (KeyboardInterrupt(), "KILLED"),
        (StagePreempted("x"), "KILLED"),
    ],
)
def test_the_parent_sets_the_status(
    server: Server, run: tuple[RunPlan, RunConfig], error: BaseException, status: str
) -> None:
    plan, config = run
    with pytest.raises(type(error)), tracked_run(plan, config, server.uri) as sync:  # noqa: PT012
        wait_until(lambda: sync.run_id)
        raise error
    client = MlflowClient(server.uri)
    assert client.get_run(sync.run_id).info.status == status
    with tracked_run(plan, config, server.uri) as again:
        wait_until(lambda: again.run_id)
        assert client.get_run(again.run_id).info.status == "RUNNING"
    assert again.run_id == sync.run_id
    assert client.get_run(sync.run_id).info.status == "FINISHED"


@pytest.mark.service
def test_what_a_run_says_about_itself(server: Server, tmp_path: Path) -> None:
    document = micro_document(tmp_path)
    document["tracking"] = {"experiment": "other", "tags": {"team": "blue", "api_key": "hunter2"}}
    config = parse_config(document)
    plan = plan_run(config)
    write_run_folder(plan, config)
    write_steps(plan, range(1, 3), stage="prepare_base")
    with tracked_run(plan, config, server.uri, {"prefect.flow_run": "abc"}) as sync:
        report = tmp_path / "report.html"
        report.write_text("<p>", encoding="utf-8")
        sync.attach(report)
    client = MlflowClient(server.uri)
    run = client.get_run(sync.run_id)
    assert run.data.params["ebft.ce_coef"] == "0.5"
    assert run.data.params["model.from_scratch.hidden_size"] == "32"
    assert len(run.data.params) < 120
    assert run.data.tags["ebft.run_key"] == plan.run_key
    assert run.data.tags["ebft.code_digest"] == plan.code_digest
    assert run.data.tags["prefect.flow_run"] == "abc"
    assert run.data.tags["team"] == "blue"
    assert "hunter2" not in str(run.to_dictionary())
    (data,) = run.inputs.dataset_inputs
    assert plan.data_digest.startswith(data.dataset.digest)
    assert {file.path for file in client.list_artifacts(sync.run_id)} == {"config.yaml", "report.html"}
    assert history(server.uri, sync.run_id, "prepare_base/ebft/reward") == complete(2)


@pytest.mark.service
def test_a_crash_between_creating_the_run_and_noting_it_makes_no_second_run(
    server: Server, run: tuple[RunPlan, RunConfig]
) -> None:
    plan, config = run
    note = plan.run_dir / "tracking.json"
    with tracked_run(plan, config, server.uri) as first:
        pass
    text = note.read_text(encoding="utf-8")
    note.write_text(text.replace(f'"{first.run_id}"', "null"), encoding="utf-8")
    with tracked_run(plan, config, server.uri) as second:
        pass
    assert second.run_id == first.run_id


def test_default_store_is_a_database_in_the_workspace(
    tmp_path: Path, run: tuple[RunPlan, RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, config = run
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    uri = tracking_uri(config, plan.workspace)
    assert uri == f"sqlite:///{plan.workspace}/mlflow.db"
    with tracked_run(plan, config, uri) as sync:
        write_steps(plan, range(1, 4))
    assert history(uri, sync.run_id, "ebft/reward") == complete(3)
    assert (plan.workspace / "mlartifacts").is_dir()


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/mlruns", "ftp://host"])
def test_stores_that_mlflow_does_not_have_are_refused(
    run: tuple[RunPlan, RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str
) -> None:
    _, config = run
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(UserError, match="cannot track there"):
        tracking_uri(config, tmp_path)
