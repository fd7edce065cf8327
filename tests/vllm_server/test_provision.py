"""The flow's side of the server: provided, provided again after its keeper died, and gone at the end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebft_core.config import RunConfig
from ebft_core.runs import RunPlan
from ebft_core.vllm.client import VLLMClient
from ebft_core.vllm.state import read_state, server_folder
from tasks import provision_vllm as provision
from tasks.observe import observing
from tasks.supervise import StageRefused
from tests.vllm_server.builders import inject, made_up_model, processes_with, running_stub, stub_python
from tests.vllm_server.runs import prepared_run


@pytest.fixture
def plan(tmp_path: Path) -> Iterator[RunPlan]:
    inject(tmp_path / "faults.json")
    python = stub_python(tmp_path, tmp_path / "faults.json")
    plan, _ = prepared_run(tmp_path, made_up_model(tmp_path), python)
    yield plan
    provision.end_server(str(plan.run_dir))


def as_structured(monkeypatch: pytest.MonkeyPatch, *, use_vllm: bool = True) -> None:
    """Let the task see a structured run, whatever the run file says."""
    read = provision._read

    def structured(run_dir: str) -> tuple[RunPlan, RunConfig]:
        plan, config = read(run_dir)
        ebft = config.ebft.model_copy(update={"mode": "structured"})
        rollout = config.rollout.model_copy(update={"use_vllm": use_vllm})
        return plan, config.model_copy(update={"ebft": ebft, "rollout": rollout})

    monkeypatch.setattr(provision, "_read", structured)


def test_a_server_is_provided_once_and_gone_at_the_end(plan: RunPlan) -> None:
    seen: list[str] = []
    with observing(lambda stage, event: seen.append(f"{stage}: {event.get('text', '')}")):
        first = provision.ensure_server(str(plan.run_dir))
    assert VLLMClient(first["url"], first["model_name"]).complete([1], max_tokens=1)
    assert provision.ensure_server(str(plan.run_dir)) == first
    assert any("provision_vllm: vLLM server ready after" in line for line in seen)
    provision.end_server(str(plan.run_dir))
    assert processes_with(first["nonce"]) == []
    provision.end_server(str(plan.run_dir))  # nothing left to do


def test_a_retry_gets_a_new_server_when_the_keeper_is_gone(plan: RunPlan) -> None:
    first = provision.ensure_server(str(plan.run_dir))
    os.kill(first["keeper_pid"], signal.SIGKILL)
    deadline = time.monotonic() + 10.0
    while processes_with(first["nonce"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    second = provision.ensure_server(str(plan.run_dir))
    assert second["nonce"] != first["nonce"]
    assert VLLMClient(second["url"], second["model_name"]).complete([1], max_tokens=1)


def test_a_start_that_fails_is_refused_in_the_keepers_words(plan: RunPlan, tmp_path: Path) -> None:
    inject(tmp_path / "faults.json", die_at_start="no such kernel")
    with pytest.raises(StageRefused) as caught:
        provision.ensure_server(str(plan.run_dir))
    assert "RuntimeError: no such kernel" in caught.value.render()
    assert "ended while it was starting" in caught.value.render()


def test_a_users_own_server_is_checked_and_written_down(tmp_path: Path) -> None:
    with running_stub(tmp_path) as (url, _):
        model = made_up_model(tmp_path)
        plan, _ref = prepared_run(tmp_path, model, tmp_path, vllm={"python": None, "url": url})
        state = provision.ensure_server(str(plan.run_dir))
        assert (state["url"], state["model_name"], state["keeper_pid"]) == (url, "theirs", None)
        assert read_state(server_folder(plan.run_dir)) is not None
        provision.end_server(str(plan.run_dir))
        assert VLLMClient(url, "theirs").health()  # it is not ours to end


@pytest.mark.parametrize("way", ["body ends", "body fails", "interrupt"])
def test_the_server_lasts_as_long_as_the_block(
    plan: RunPlan, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    as_structured(monkeypatch)
    monkeypatch.setattr(provision, "provision_vllm", lambda run_dir, base: provision.ensure_server(run_dir))
    nonces: list[str] = []

    def body() -> None:
        with provision.vllm_server(str(plan.run_dir), {}) as state:
            assert state is not None
            nonces.append(state["nonce"])
            assert processes_with(state["nonce"])
            if way == "body fails":
                raise ValueError(way)
            if way == "interrupt":
                raise KeyboardInterrupt

    failure: dict[str, Any] = {"body fails": ValueError, "interrupt": KeyboardInterrupt}
    if way in failure:
        with pytest.raises(failure[way]):
            body()
    else:
        body()
    assert processes_with(nonces[0]) == []


def test_a_run_that_needs_no_server_starts_none(plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = str(plan.run_dir)
    assert not provision.server_needed(run_dir)  # strided
    with provision.vllm_server(run_dir, {}) as state:
        assert state is None
    as_structured(monkeypatch, use_vllm=False)
    assert not provision.server_needed(run_dir)
    as_structured(monkeypatch)
    assert provision.server_needed(run_dir)
    from ebft_core.manifests import commit_folder

    output = plan.stage("train").output
    staging = output.with_name("staging")
    staging.mkdir(parents=True)
    (staging / "x").write_text("x")
    commit_folder(staging, output, schema="ebft.train/1", meta={})
    assert not provision.server_needed(run_dir)  # trained already


@pytest.mark.service
def test_the_task_sweeps_and_reports_in_prefect(plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect import flow
    from prefect.testing.utilities import prefect_test_harness

    from ebft_core.manifests import verify_folder

    as_structured(monkeypatch)
    base = verify_folder(plan.stage("prepare_base").output)
    assert base is not None

    @flow(name="serve-and-stop")
    def serve_and_stop() -> dict[str, Any]:
        with provision.vllm_server(str(plan.run_dir), base.to_json()) as state:
            assert state is not None
            assert VLLMClient(state["url"], state["model_name"]).health()
            return state

    with prefect_test_harness():
        state = serve_and_stop()
    assert processes_with(state["nonce"]) == []
