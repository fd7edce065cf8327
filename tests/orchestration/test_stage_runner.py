"""The stage program: exit codes, skip, commit, locks, and what it leaves on disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ebft_core.errors import ExitCode
from ebft_core.events import read_events
from ebft_core.manifests import StageRef, read_meta, verify_folder
from ebft_core.runs import RunPlan
from ebft_core.stage_runner import read_stage_ref
from orchestration.builders import fake_command, planned_run

FIRST = "prepare_base"


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    return planned_run(tmp_path)


def start(plan: RunPlan, behaviour: str, stage: str = FIRST, **env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        fake_command(stage, plan.run_dir, behaviour),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **env},
        start_new_session=True,
    )


def events(plan: RunPlan, stage: str = FIRST) -> list[dict[str, object]]:
    return read_events(plan.run_dir / "events" / f"{stage}.jsonl")


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def is_working(plan: RunPlan) -> bool:
    return any(event["kind"] == "progress" for event in events(plan))


def test_a_finished_stage_is_committed_recorded_and_then_skipped(plan: RunPlan) -> None:
    stage = plan.stage(FIRST)
    assert start(plan, "work").wait() == ExitCode.DONE
    ref = verify_folder(stage.output)
    assert ref is not None
    assert read_stage_ref(plan.run_dir, FIRST) == ref
    assert read_meta(stage.output)["steps"] == 3
    assert (stage.output / "result.txt").read_text() == "micro"
    assert not stage.work.exists()
    before = len(events(plan))
    assert start(plan, "crash").wait() == ExitCode.DONE  # not even looked at
    assert len(events(plan)) == before


def test_another_run_with_the_same_stage_gets_its_journal(plan: RunPlan, tmp_path: Path) -> None:
    assert start(plan, "work").wait() == ExitCode.DONE
    journal = plan.run_dir / "events" / f"{FIRST}.jsonl"
    kept = [e for e in events(plan) if e["kind"] == "metrics"]
    journal.unlink()  # the other run has the same plan, but nothing in its folder
    (plan.run_dir / "stages" / f"{FIRST}.json").unlink()
    assert start(plan, "crash").wait() == ExitCode.DONE
    assert [e for e in events(plan) if e["kind"] == "metrics"] == kept


@pytest.mark.parametrize(
    ("behaviour", "code", "what"),
    [
        ("refuse", ExitCode.BAD_INPUT, "stride is 0"),
        ("crash", ExitCode.INTERNAL, "RuntimeError: the flux is off"),
    ],
)
def test_exit_codes_and_the_error_event(plan: RunPlan, behaviour: str, code: int, what: str) -> None:
    assert start(plan, behaviour).wait() == code
    (error,) = [e["error"] for e in events(plan) if e["kind"] == "error"]
    assert isinstance(error, dict)
    assert error["what"] == what
    assert verify_folder(plan.stage(FIRST).output) is None
    assert read_stage_ref(plan.run_dir, FIRST) is None


def test_a_stage_whose_inputs_are_missing_or_damaged_is_refused(plan: RunPlan) -> None:
    assert start(plan, "work", stage="tokenize").wait() == ExitCode.BAD_INPUT
    assert start(plan, "work").wait() == ExitCode.DONE
    (plan.stage(FIRST).output / "result.txt").write_text("damag", encoding="utf-8")  # same size
    assert start(plan, "work", stage="tokenize").wait() == ExitCode.BAD_INPUT
    errors = [e["error"] for e in events(plan, "tokenize") if e["kind"] == "error"]
    assert len(errors) == 2
    assert "prepare_base" in str(errors[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_stage_with_a_checkpoint(plan: RunPlan, number: signal.Signals) -> None:
    program = start(plan, "listen")
    wait_until(lambda: is_working(plan))
    program.send_signal(number)
    assert program.wait(timeout=20) == ExitCode.PREEMPTED
    assert number.name in (plan.stage(FIRST).work / "checkpoint").read_text()
    assert plan.stage(FIRST).state == "partial"


def test_a_supervised_stage_stops_when_its_parent_is_gone(plan: RunPlan) -> None:
    program = start(plan, "listen", EBFT_SUPERVISED="1")
    wait_until(lambda: is_working(plan))
    assert program.stdin is not None
    program.stdin.close()
    assert program.wait(timeout=20) == ExitCode.PREEMPTED
    assert "parent" in (plan.stage(FIRST).work / "checkpoint").read_text()


def test_by_hand_the_end_of_stdin_means_nothing(plan: RunPlan) -> None:
    program = start(plan, "listen")
    assert program.stdin is not None
    program.stdin.close()
    wait_until(lambda: is_working(plan))
    time.sleep(0.3)
    assert program.poll() is None
    program.terminate()
    assert program.wait(timeout=20) == ExitCode.PREEMPTED


def test_an_orphan_that_does_not_listen_ends_itself_and_its_children(plan: RunPlan) -> None:
    program = start(plan, "ignore", EBFT_SUPERVISED="1", EBFT_ORPHAN_GRACE="0.2")
    wait_until(lambda: is_working(plan))
    pids = [int(str(e["text"]).removeprefix("pid ")) for e in events(plan) if e["kind"] == "message"]
    assert len(pids) == 2
    assert program.stdin is not None
    program.stdin.close()
    program.wait(timeout=20)
    wait_until(lambda: not any(psutil.pid_exists(p) and _alive(p) for p in pids))


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_two_programs_of_one_stage_take_turns_and_work_once(plan: RunPlan) -> None:
    first = start(plan, "listen")
    wait_until(lambda: is_working(plan))
    second = start(plan, "work")
    wait_until(lambda: any("waiting" in str(e.get("text")) for e in events(plan)))
    assert str(first.pid) in str([e.get("text") for e in events(plan)])
    first.terminate()
    assert first.wait(timeout=20) == ExitCode.PREEMPTED
    assert second.wait(timeout=20) == ExitCode.DONE


def test_what_a_killed_attempt_left_in_the_staging_folder_is_not_committed(plan: RunPlan) -> None:
    output = plan.stage(FIRST).output
    staging = output.with_name(f".staging-{output.name}")
    staging.mkdir(parents=True)
    (staging / "leftover").touch()
    assert start(plan, "work").wait() == ExitCode.DONE
    assert not (output / "leftover").exists()


def test_code_that_changed_since_the_plan_is_refused(plan: RunPlan) -> None:
    path = plan.run_dir / "plan.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "code_digest": "0" * 64}))
    assert start(plan, "work").wait() == ExitCode.BAD_INPUT
    assert "code" in str(events(plan)[-1])


def test_reference_on_disk_is_small_json(plan: RunPlan) -> None:
    assert start(plan, "work").wait() == ExitCode.DONE
    document = json.loads((plan.run_dir / "stages" / f"{FIRST}.json").read_text())
    assert set(document) == {"uri", "sha256", "bytes", "schema"}
    assert StageRef.from_json(document).schema == "ebft.prepare_base/1"
