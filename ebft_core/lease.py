"""One start of a run at a time: the holder of the run's folder is named to everyone else."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from ebft_core.errors import UserError
from ebft_core.manifests import write_json_atomic

LEASE = "lease.lock"


@contextlib.contextmanager
def hold_lease(run_dir: Path) -> Iterator[None]:
    """Hold the run's folder while the block runs.

    The lock belongs to the process, so a killed holder frees it; `lease.json` only says who it is.

    Raises:
        UserError: another process holds it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run_dir / LEASE, thread_local=False)
    note = run_dir / "lease.json"
    try:
        lock.acquire(timeout=1)  # `is_held` may look just now
    except Timeout:
        raise UserError(
            "this run is already going on",
            where=str(run_dir),
            value=_holder(note),
            hint="wait for it, or stop it with Ctrl-C (SIGTERM to that process); it then writes a checkpoint",
        ) from None
    try:
        started = datetime.now(UTC).isoformat(timespec="seconds")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "user": user_name(), "started": started}
        write_json_atomic(note, holder)
        yield
    finally:
        note.unlink(missing_ok=True)
        lock.release()


def workspace_lock(workspace: Path) -> FileLock:
    """Held for a moment by a run that writes its plan, and by `ebft gc` for each removal.

    So a plan is seen before a stage that it names is removed, or the stage is gone before its run looks.
    """
    return FileLock(workspace / "gc.lock")


def stage_lock(workspace: Path, name: str, key: str) -> Path:
    """The lock file of a stage's key."""
    return workspace / "work" / name / f"{key}.lock"


@contextlib.contextmanager
def if_free(path: Path | None) -> Iterator[bool]:
    """Hold a lock file while the block runs, and say so; False: somebody else has it. None is always free."""
    if path is None:
        yield True
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def is_held(path: Path) -> bool:
    """Whether somebody holds a lock file now."""
    if not path.exists():
        return False
    with if_free(path) as free:
        return not free


def _holder(note: Path) -> str:
    try:
        who = json.loads(note.read_text(encoding="utf-8"))
        return f"process {who['pid']} of {who['user']} on {who['host']}, started {who['started']}"
    except (OSError, ValueError, KeyError):
        return "a process that is just starting"


def user_name() -> str:
    """Who runs this process, for people."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for its user id
        return f"uid {os.getuid()}"
