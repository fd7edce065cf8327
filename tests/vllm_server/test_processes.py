"""Who is signalled: exactly the processes that were written down, never one that got their number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from ebft_core.vllm import guarded_exec
from ebft_core.vllm.processes import (
    carries,
    end_group,
    end_leftovers,
    group_members,
    is_same_process,
    start_ticks,
)
from ebft_core.vllm.server_log import log_excerpt
from ebft_core.vllm.state import LOCK, ServerState, read_state, write_state
from ebft_core.vllm.sweep import end_left_behind, sweep_workspace

NONCE = "n0nce0123456"
NEVER = 987_654_321


class Group:
    """A leader with one child that carries a nonce, in a group of their own."""

    def __init__(self, nonce: str, *, leader_lives: bool = True) -> None:
        child = "subprocess.Popen(['sleep', '60'])"
        end = "time.sleep(60)" if leader_lives else "pass"
        code = f"import subprocess, time; {child}; print('up', flush=True); {end}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "EBFT_VLLM_NONCE": nonce},
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"up\n"
        self.ticks = start_ticks(self.process.pid)
        if not leader_lives:
            self.process.wait()

    @property
    def id(self) -> int:
        return self.process.pid

    def state(self, **changes: object) -> ServerState:
        fields = {"server_pid": self.id, "server_pgid": self.id, "start_ticks": self.ticks, "nonce": NONCE}
        return ServerState(url="http://x", model_name="m", phase="ready", **{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    made: list[Group] = []
    yield made
    for group in made:
        for pid in group_members(group.id):
            os.kill(pid, signal.SIGKILL)
        group.process.wait()


def gone(group: int) -> bool:
    deadline = time.monotonic() + 5.0
    while group_members(group) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not group_members(group)


def test_a_process_is_known_by_its_number_and_its_start() -> None:
    pid, ticks = os.getpid(), start_ticks(os.getpid())
    assert is_same_process(pid, ticks)
    assert not is_same_process(pid, NEVER)
    assert not is_same_process(None, ticks)
    zombie = subprocess.Popen(["true"])
    time.sleep(0.2)
    assert start_ticks(zombie.pid) is None
    zombie.wait()


def test_a_group_is_ended_with_its_stopped_members(groups: list[Group]) -> None:
    groups.append(Group(NONCE))
    os.kill(groups[0].id, signal.SIGSTOP)
    assert len(group_members(groups[0].id)) == 2
    end_group(groups[0].id, grace_seconds=2.0)
    assert gone(groups[0].id)


def test_leftovers_need_the_nonce(groups: list[Group]) -> None:
    groups += [Group(NONCE, leader_lives=False), Group("somebody-else", leader_lives=False)]
    ours, theirs = groups
    assert end_leftovers(theirs.id, NONCE) == []
    assert len(group_members(theirs.id)) == 1
    assert len(end_leftovers(ours.id, NONCE)) == 1
    assert gone(ours.id)


def test_the_nonce_is_found_in_command_lines_and_environments() -> None:
    by_command = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)", NONCE])
    by_environment = subprocess.Popen(["sleep", "30"], env={**os.environ, "X": NONCE})
    try:
        time.sleep(0.2)
        assert carries(by_command.pid, NONCE)
        assert carries(by_environment.pid, NONCE)
        assert not carries(os.getpid(), NONCE)
    finally:
        for process in (by_command, by_environment):
            process.kill()
            process.wait()


@pytest.mark.parametrize("leader_lives", [True, False])
def test_what_a_killed_run_left_is_swept(tmp_path: Path, groups: list[Group], leader_lives: bool) -> None:
    groups.append(Group(NONCE, leader_lives=leader_lives))
    folder = tmp_path / "runs" / "micro-0123" / "vllm"
    folder.mkdir(parents=True)
    write_state(folder, groups[0].state())
    assert sweep_workspace(tmp_path) == [str(folder)]
    assert gone(groups[0].id)
    state = read_state(folder)
    assert state is not None
    assert state.phase == "stopped"
    assert sweep_workspace(tmp_path) == []


@pytest.mark.parametrize("changes", [{"start_ticks": NEVER, "nonce": "of-another-run"}, {"nonce": None}])
def test_a_reused_number_and_a_users_server_are_left_alone(
    tmp_path: Path, groups: list[Group], changes: dict[str, object]
) -> None:
    groups.append(Group(NONCE))
    write_state(tmp_path, groups[0].state(**changes))
    assert not end_left_behind(tmp_path)
    assert len(group_members(groups[0].id)) == 2


def test_a_folder_that_a_living_keeper_holds_is_passed_over(tmp_path: Path, groups: list[Group]) -> None:
    groups.append(Group(NONCE))
    folder = tmp_path / "runs" / "other-run" / "vllm"
    folder.mkdir(parents=True)
    write_state(folder, groups[0].state())
    with FileLock(folder / LOCK):
        assert sweep_workspace(tmp_path) == []
    assert len(group_members(groups[0].id)) == 2


def test_a_damaged_state_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "server.json").write_text('{"url": ')
    assert read_state(tmp_path) is None
    assert not end_left_behind(tmp_path)


@pytest.mark.parametrize("deaf", [False, True])
def test_the_guard_ends_the_group_when_its_starter_is_gone(tmp_path: Path, deaf: bool) -> None:
    trap = "trap '' TERM; " if deaf else ""
    reading, writing = os.pipe()
    script = Path(guarded_exec.__file__)
    process = subprocess.Popen(
        [
            sys.executable,
            "-I",
            "-S",
            str(script),
            str(reading),
            "/bin/sh",
            "-c",
            f"{trap}sleep 60 & wait; wait",
        ],
        pass_fds=(reading,),
        start_new_session=True,
    )
    os.close(reading)
    time.sleep(0.5)
    assert len(group_members(process.pid)) == 3
    os.close(writing)
    assert process.wait(guarded_exec.GRACE_SECONDS + 3.0) < 0
    assert gone(process.pid)


def test_the_excerpt_of_a_log_begins_with_the_reason(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("ValueError: of an earlier start\n")
    offset = log.stat().st_size
    noise = "".join(f"nanobind: leaked type {i}\n" for i in range(50))
    later = "".join(f"(EngineCore pid=7) INFO 11-21 11:52:49 [core.py:1] line {i}\n" for i in range(40))
    cause = "(Worker pid=5) ERROR 11-21 11:52:49 [x.py:63] RuntimeError: head_dim=16 is not supported\n"
    with open(log, "a") as stream:
        stream.write(f"starting\n{cause}{cause}{later}{noise}")
    lines = log_excerpt(log, offset).splitlines()
    assert lines[0] == "  ! RuntimeError: head_dim=16 is not supported"
    assert lines[-1] == "  | line 39"
    assert not any("nanobind" in line or "earlier start" in line for line in lines)
    assert len(lines) == 13
    assert log_excerpt(tmp_path / "none") == "(no log)"
