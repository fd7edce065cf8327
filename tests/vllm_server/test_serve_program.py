"""`serve-vllm` as a program: what ends it, what it leaves, and what it says when it cannot start."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from ebft_core.base_model import digest_model_folder
from ebft_core.events import read_events
from ebft_core.runs import RunPlan
from ebft_core.stop import SUPERVISED
from ebft_core.vllm.client import VLLMClient
from ebft_core.vllm.processes import group_members
from ebft_core.vllm.state import ServerState, read_state, server_folder
from tests.vllm_server.builders import inject, made_up_model, processes_with, stub_python
from tests.vllm_server.runs import prepared_run, run_document

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def faults(tmp_path: Path) -> Path:
    inject(tmp_path / "faults.json")
    return tmp_path / "faults.json"


@pytest.fixture
def plan(tmp_path: Path, faults: Path) -> RunPlan:
    return prepared_run(tmp_path, made_up_model(tmp_path), stub_python(tmp_path, faults))[0]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, supervised: bool = True) -> subprocess.Popen[str]:
        environment = {**os.environ, **({SUPERVISED: "1"} if supervised else {})}
        process = subprocess.Popen(
            [sys.executable, "-m", "ebft_core.cli", "serve-vllm", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def ready(folder: Path, process: subprocess.Popen[str], seconds: float = 30.0) -> ServerState:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        state = read_state(folder)
        if state is not None and state.phase == "ready" and state.keeper_pid == process.pid:
            return state
        if process.poll() is not None:
            raise AssertionError(process.communicate()[1])
        time.sleep(0.05)
    raise AssertionError(f"not ready: {read_state(folder)}")


def gone(nonce: str | None, seconds: float = 10.0) -> bool:
    assert nonce is not None
    deadline = time.monotonic() + seconds
    while processes_with(nonce) and time.monotonic() < deadline:
        time.sleep(0.05)
    return processes_with(nonce) == []


@pytest.mark.parametrize("way", ["SIGTERM", "SIGINT", "end of standard input"])
def test_it_serves_the_runs_base_model_and_ends_when_asked_to(plan: RunPlan, start: Start, way: str) -> None:
    process = start("--run-dir", str(plan.run_dir))
    state = ready(server_folder(plan.run_dir), process)
    assert state.model is not None
    assert state.model_digest == digest_model_folder(Path(state.model))
    assert VLLMClient(state.url, state.model_name).complete([1], max_tokens=2)
    if way.startswith("SIG"):
        process.send_signal(signal.Signals[way])
    else:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    assert process.wait(15.0) == 0
    assert gone(state.nonce, 0.0)
    final = read_state(server_folder(plan.run_dir))
    assert final is not None
    assert final.phase == "stopped"
    texts = [event.get("text", "") for event in read_events(plan.run_dir / "events" / "vllm.jsonl")]
    assert texts[-1] == "vLLM server stopped"


def test_a_killed_keeper_takes_its_server_along_and_the_next_one_starts(plan: RunPlan, start: Start) -> None:
    folder = server_folder(plan.run_dir)
    first = start("--run-dir", str(plan.run_dir))
    before = ready(folder, first)
    first.kill()
    first.wait()
    assert gone(before.nonce)
    second = start("--run-dir", str(plan.run_dir))
    after = ready(folder, second)
    assert after.nonce != before.nonce
    second.terminate()
    assert second.wait(15.0) == 0


def test_what_survived_a_killed_keeper_is_ended_by_the_next_one(plan: RunPlan, start: Start) -> None:
    folder = server_folder(plan.run_dir)
    first = start("--run-dir", str(plan.run_dir))
    before = ready(folder, first)
    assert before.server_pgid is not None
    for pid in group_members(before.server_pgid):  # the guard cannot act: as if it had been killed, too
        if "guarded_exec" in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)
    first.kill()
    first.wait()
    time.sleep(0.5)
    assert not gone(before.nonce, 0.0)
    second = start("--run-dir", str(plan.run_dir))
    ready(folder, second)
    assert gone(before.nonce, 0.0)
    second.terminate()
    assert second.wait(15.0) == 0


def test_an_error_of_the_users_is_reported_in_the_journal(tmp_path: Path, start: Start) -> None:
    plan, _ = prepared_run(tmp_path, made_up_model(tmp_path), tmp_path / "no-python")
    process = start("--run-dir", str(plan.run_dir))
    assert process.wait(60.0) == 78
    error = read_events(plan.run_dir / "events" / "vllm.jsonl")[-1]["error"]
    assert error["where"] == "vllm.python"
    assert "make setup-vllm" in error["text"]


def test_a_server_that_is_given_up_is_an_internal_failure(plan: RunPlan, faults: Path, start: Start) -> None:
    process = start("--run-dir", str(plan.run_dir))
    state = ready(server_folder(plan.run_dir), process)
    inject(faults, die_at_start="out of memory")
    assert state.server_pid is not None
    os.kill(state.server_pid, signal.SIGKILL)
    assert process.wait(40.0) == 70
    assert "out of memory" in read_events(plan.run_dir / "events" / "vllm.jsonl")[-1]["error"]["what"]


def test_alone_it_says_where_it_is_and_ctrl_c_ends_it(tmp_path: Path, faults: Path, start: Start) -> None:
    model = made_up_model(tmp_path)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    document = run_document(tmp_path, model, stub_python(tmp_path, faults))
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(document))
    process = start(str(file), "--set", "vllm.max_model_len=48", supervised=False)
    state = ready(tmp_path / "workspace" / "serve" / "served" / "vllm", process)
    assert state.max_model_len == 48
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=15.0)[1]
    assert process.returncode == 0
    assert f"{state.url}/v1" in said
    assert state.model_name in said
    assert gone(state.nonce, 0.0)


def test_mistakes_at_the_command_line(tmp_path: Path, faults: Path, plan: RunPlan, start: Start) -> None:
    file = tmp_path / "run.yaml"
    python = stub_python(tmp_path, faults)
    file.write_text(yaml.safe_dump(run_document(tmp_path, made_up_model(tmp_path), python)))
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        taken = str(squatter.getsockname()[1])
        cases = {
            (): "what to serve is not clear",
            (str(file), "--run-dir", str(plan.run_dir)): "what to serve is not clear",
            ("--run-dir", str(plan.run_dir), "--port", "1"): "what to serve is not clear",
            ("--run-dir", str(tmp_path)): "not a run folder",
            (str(file), "--model", str(tmp_path / "none")): "no such folder",
            (
                str(file),
                "--set",
                "vllm.python=null",
                "--set",
                "vllm.url=http://h:1",
            ): "a server that runs already",
            (str(file), "--port", taken): "port is taken",
        }
        for arguments, said in cases.items():
            process = start(*arguments, supervised=False)
            error = process.communicate(timeout=60.0)[1]
            assert process.returncode == 78, (arguments, error)
            assert said in error
