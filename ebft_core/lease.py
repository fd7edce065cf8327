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


@contextlib.contextmanager
def hold_lease(run_dir: Path) -> Iterator[None]:
    """Hold the run's folder while the block runs.

    The lock belongs to the process, so a killed holder frees it; `lease.json` only says who it is.

    Raises:
        UserError: another process holds it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run_dir / "lease.lock", thread_local=False)
    note = run_dir / "lease.json"
    try:
        lock.acquire(timeout=0)
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
