"""The parent of a stage program: it learns how the child ended, and it leaves nobody behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from ebft_core.events import read_events
from ebft_core.runs import RunPlan
from orchestration.builders import fake_command, planned_run
from orchestration.test_stage_runner import wait_until
from tasks.supervise import StageFailed, StagePreempted, StageRefused, supervise

STAGE = "prepare_base"


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    return planned_run(tmp_path)


def watch(plan: RunPlan, behaviour: str, on_event: Any = None, grace: float = 5.0) -> list[Mapping[str, Any]]:
    seen: list[Mapping[str, Any]] = []

    def collect(event: Mapping[str, Any]) -> None:
        seen.append(event)
        if on_event is not None:
            on_event(event)

    command = fake_command(STAGE, plan.run_dir, behaviour)
    supervise(command, stage=STAGE, run_dir=plan.run_dir, on_event=collect, grace_seconds=grace)
    return seen


def pids(plan: RunPlan) -> list[int]:
    found = read_events(plan.run_dir / "events" / f"{STAGE}.jsonl")
    return [int(e["text"].removeprefix("pid ")) for e in found if str(e.get("text", "")).startswith("pid ")]


def gone(numbers: list[int]) -> bool:
    alive = [p for p in numbers if psutil.pid_exists(p)]
    return all(psutil.Process(p).status() == psutil.STATUS_ZOMBIE for p in alive)


def test_events_arrive_once_and_those_of_earlier_attempts_do_not(plan: RunPlan) -> None:
    with pytest.raises(StageRefused):
        watch(plan, "refuse")
    seen = watch(plan, "work")
    assert [e["step"] for e in seen if e["kind"] == "metrics"] == [1, 2, 3]
    assert not [e for e in seen if e["kind"] == "error"]


def test_bad_input_keeps_the_shape_of_the_error(plan: RunPlan) -> None:
    with pytest.raises(StageRefused) as caught:
        watch(plan, "refuse")
    expected = [
        "error: stride is 0",
        "  where:    ebft.stride",
        "  value:    0",
        "  expected: at least 1",
        "  hint:     use 8",
    ]
    assert caught.value.render().splitlines() == expected


def test_a_broken_program_shows_the_end_of_its_log(plan: RunPlan) -> None:
    with pytest.raises(StageFailed, match="exit code 70: RuntimeError: the flux is off") as caught:
        watch(plan, "crash")
    assert "Traceback" in str(caught.value)
    assert "fake_stages.py" in str(caught.value)


def test_a_killed_program_is_named_by_its_signal(plan: RunPlan) -> None:
    with pytest.raises(StageFailed, match="killed by SIGKILL") as caught:
        watch(plan, "die")
    assert caught.value.code == -signal.SIGKILL


def test_output_goes_to_files_of_the_run(plan: RunPlan) -> None:
    with pytest.raises(StageFailed):
        watch(plan, "crash")
    assert "the flux is off" in (plan.run_dir / "logs" / f"{STAGE}.err.log").read_text()
    assert (plan.run_dir / "logs" / f"{STAGE}.out.log").exists()


def interrupt_when_working(event: Mapping[str, Any]) -> None:
    if event["kind"] == "progress":
        raise KeyboardInterrupt


def test_an_interrupt_lets_the_child_write_its_checkpoint(plan: RunPlan) -> None:
    with pytest.raises(KeyboardInterrupt):
        watch(plan, "listen", interrupt_when_working)
    assert "SIGTERM" in (plan.stage(STAGE).work / "checkpoint").read_text()
    assert gone(pids(plan))


def test_a_hung_child_and_its_own_children_are_killed(plan: RunPlan) -> None:
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        watch(plan, "ignore", interrupt_when_working, grace=1.0)
    assert time.monotonic() - began < 30
    assert len(pids(plan)) == 2
    wait_until(lambda: gone(pids(plan)))


def test_the_second_interrupt_does_not_wait(plan: RunPlan) -> None:
    def twice(event: Mapping[str, Any]) -> None:
        if event["kind"] == "progress":
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        watch(plan, "ignore", twice, grace=300.0)
    assert time.monotonic() - began < 60
    wait_until(lambda: gone(pids(plan)))


def test_a_child_stopped_by_somebody_else_is_preempted(plan: RunPlan) -> None:
    def stop_child(event: Mapping[str, Any]) -> None:
        if event["kind"] == "progress":
            os.kill(pids(plan)[0], signal.SIGTERM)

    with pytest.raises(StagePreempted):
        watch(plan, "listen", stop_child)


def test_when_the_parent_is_killed_the_child_checkpoints_and_ends(plan: RunPlan) -> None:
    command = fake_command(STAGE, plan.run_dir, "listen")
    code = (
        "import pathlib; from tasks.supervise import supervise\n"
        f"supervise({command!r}, stage={STAGE!r}, run_dir=pathlib.Path({str(plan.run_dir)!r}),"
        " on_event=lambda event: None)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    journal = plan.run_dir / "events" / f"{STAGE}.jsonl"
    wait_until(lambda: any(e["kind"] == "progress" for e in read_events(journal)))
    parent.kill()
    parent.wait()
    wait_until(lambda: gone(pids(plan)))
    assert "parent" in (plan.stage(STAGE).work / "checkpoint").read_text()
