"""Runs a stage program as a child process and never leaves it behind.

The child gets its own session and process group, files for its output (a pipe could be held open by
an orphan), and a pipe as standard input that carries nothing: its end tells the child that the parent
died. What the child reports comes through its journal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from ebft_core.errors import ExitCode, UserError
from ebft_core.events import EventReader
from ebft_core.stop import SUPERVISED

GRACE_SECONDS = 20.0
"""From SIGTERM to SIGKILL; Prefect gives a cancelled flow 30 seconds, and the tracker needs a few of them."""

POLL_SECONDS = 0.2
_TAIL_LINES = 20

EventCallback = Callable[[Mapping[str, Any]], None]

STOPPING = threading.Event()
"""Set when this process is to end: an interrupt reaches the main thread only; stages may run in others."""

_ENVIRONMENT: ContextVar[Mapping[str, str] | None] = ContextVar("ebft_stage_environment", default=None)


class StageFailed(Exception):  # noqa: N818 (the name of the outcome)
    """The program broke (exit 70, a signal, an unknown code): worth a retry."""

    def __init__(self, stage: str, code: int, reason: str, log: Path) -> None:
        self.stage = stage
        self.code = code
        self.log = log
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        super().__init__(f"stage {stage} {how}: {reason}\n{_tail(log)}\n(whole log: {log})")


class StagePreempted(Exception):  # noqa: N818
    """The program stopped on request with a checkpoint (exit 75): a retry resumes it."""


class StageRefused(UserError):  # noqa: N818
    """The program refused its input (exit 78): never retried. Shown exactly as the program said it."""

    def __init__(self, payload: Mapping[str, Any]) -> None:
        self._text = str(payload.get("text", ""))
        super().__init__(
            str(payload.get("what", "bad input")),
            where=payload.get("where"),
            expected=payload.get("expected"),
            hint=payload.get("hint"),
        )

    def render(self) -> str:
        """The program's own words."""
        return self._text or super().render()


def supervise(
    command: Sequence[str],
    *,
    stage: str,
    run_dir: Path,
    on_event: EventCallback,
    cwd: Path | None = None,
    grace_seconds: float = GRACE_SECONDS,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run `command` to its end, handing every event of `run_dir/events/<stage>.jsonl` to `on_event`.

    Whatever ends this call early (Ctrl-C, a cancelled flow run, an error in `on_event`), the child is
    asked to stop, given `grace_seconds` to write a checkpoint, and its whole group is then killed.

    Raises:
        StageRefused: exit 78.
        StagePreempted: exit 75, or this process is to end.
        StageFailed: anything else but 0.
    """
    reader = EventReader(run_dir / "events" / f"{stage}.jsonl")
    for _ in reader.read():
        pass  # events of earlier attempts
    last_error: dict[str, Any] = {}

    def pump() -> None:
        for event in reader.read():
            if event["kind"] == "error":
                last_error.update(event["error"])
            on_event(event)

    log = run_dir / "logs" / f"{stage}.err.log"
    variables = {**(_ENVIRONMENT.get() or {}), **(environment or {})}
    with child_process(command, log, cwd, grace_seconds, variables) as process:
        while not ended(process):
            pump()
            if STOPPING.wait(POLL_SECONDS):
                raise StagePreempted(f"stage {stage} was stopped with its parent")
    pump()
    check_exit(stage, process.returncode, last_error, log)


@contextlib.contextmanager
def stage_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Add variables to the environment of every stage program that this thread starts inside the block."""
    token = _ENVIRONMENT.set(variables)
    try:
        yield
    finally:
        _ENVIRONMENT.reset(token)


def check_exit(stage: str, code: int, last_error: Mapping[str, Any], log: Path) -> None:
    """Raise what the exit code of a stage program means, as `supervise` says; 0 means nothing."""
    if code == ExitCode.BAD_INPUT:
        raise StageRefused(last_error or {"what": f"stage {stage} refused its input", "where": str(log)})
    if code == ExitCode.PREEMPTED:
        raise StagePreempted(f"stage {stage} was stopped; its checkpoint is kept")
    if code != ExitCode.DONE:
        raise StageFailed(stage, code, str(last_error.get("what", "no reason was reported")), log)


def stage_command(stage: str, run_dir: Path) -> list[str]:
    """The command line of a stage program."""
    return [sys.executable, "-m", "ebft_core.cli", "stage", stage, "--run-dir", str(run_dir)]


@contextlib.contextmanager
def child_process(
    command: Sequence[str],
    log: Path,
    cwd: Path | None,
    grace_seconds: float = GRACE_SECONDS,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A program in a session of its own for as long as the block runs; stopped and reaped at its end.

    `environment` is added to this process's own. `log` takes standard error, `<name>.out.log` beside it
    (for `<name>.err.log`) standard output.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    out = log.with_name(log.name.replace(".err.log", ".out.log"))
    with open(out, "ab") as stdout, open(log, "ab") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            env={**os.environ, **(environment or {}), SUPERVISED: "1"},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        try:
            _stop(process, grace_seconds)
        finally:
            # The leader is not reaped yet, so its group id cannot belong to anybody else.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the child has ended; leaves it unreaped."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _stop(process: subprocess.Popen[bytes], grace_seconds: float) -> None:
    """Ask the child to stop and wait; a second interrupt cuts the waiting short."""
    if ended(process):
        return
    os.kill(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while not ended(process) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _tail(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return "  (no log)"
    return "\n".join(f"  | {line}" for line in lines[-_TAIL_LINES:]) or "  (the log is empty)"
