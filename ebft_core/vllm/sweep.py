"""Ends what killed runs left behind: keepers without a flow, servers without a keeper.

Only processes that are provably the ones written down are touched (see `processes.py`), and only while nobody
holds the folder's lock.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from ebft_core.errors import UserError
from ebft_core.vllm.processes import end_group, end_leftovers, is_same_process
from ebft_core.vllm.state import FOLDER, LOCK, STATE, ServerState, read_state, write_state

_KEEPER_SECONDS = 15.0
"""How long a keeper whose flow has died may take to end its server by itself."""


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Be the only keeper of a folder, and begin with no leftovers in it.

    Raises:
        UserError: another keeper lives there and does not end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, thread_local=False)
    try:
        lock.acquire(timeout=_KEEPER_SECONDS)
    except Timeout:
        state = read_state(folder)
        raise UserError(
            "another process keeps a vLLM server in this folder",
            where=str(folder),
            value=None if state is None else f"process {state.keeper_pid}, server at {state.url}",
            hint="stop it (SIGTERM ends it together with its server), or wait for its run to end",
        ) from None
    try:
        end_left_behind(folder)
        yield
    finally:
        lock.release()


def sweep_workspace(workspace: Path) -> list[str]:
    """End what any killed run of the workspace left; returns the folders where something was found.

    Folders whose keeper lives are passed over: their lock is held.
    """
    swept = []
    for path in sorted(workspace.glob(f"runs/*/{FOLDER}/{STATE}")):
        lock = FileLock(path.with_name(LOCK), thread_local=False)
        with contextlib.suppress(Timeout), lock.acquire(timeout=0):
            if end_left_behind(path.parent):
                swept.append(str(path.parent))
    return swept


def end_left_behind(folder: Path) -> bool:
    """End the processes the folder's state names, if they still are what it names; the caller has the lock.

    Returns:
        Whether there were any.
    """
    state = read_state(folder)
    if state is None or not state.kept:
        return False
    found = _end_keeper(state)
    if is_same_process(state.server_pid, state.start_ticks) and state.server_pgid is not None:
        end_group(state.server_pgid)
        found = True
    if state.server_pgid is not None and state.nonce is not None:  # the leader is dead, its workers live
        found = bool(end_leftovers(state.server_pgid, state.nonce)) or found
    if found:
        write_state(folder, replace(state, phase="stopped", error="its run was killed; ended afterwards"))
    return found


def _end_keeper(state: ServerState) -> bool:
    """A keeper without the lock is one that is just ending, or a stopped one."""
    if not state.keeper_alive or state.keeper_pid is None or state.keeper_pid == os.getpid():
        return False
    deadline = time.monotonic() + _KEEPER_SECONDS
    while state.keeper_alive and time.monotonic() < deadline:
        time.sleep(0.1)
    if state.keeper_alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(state.keeper_pid, signal.SIGKILL)
    return True
