"""Processes by what they are, not by a number that the kernel gives away again.

A process id means nothing once its process has ended. Two facts make it safe to signal one that an earlier
run wrote down: the moment it started (`start_ticks`), which a reused id cannot share, and the run's nonce
in its command line, which vLLM's helper processes carry as well (see `spec.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

from ebft_core.errors import UserError

HOST = "127.0.0.1"
GRACE_SECONDS = 6.0
"""From SIGTERM to SIGKILL of a server's process group."""

_POLL_SECONDS = 0.05
_PROC = Path("/proc")
_STATE, _GROUP, _START = 0, 2, 19  # fields of /proc/PID/stat behind the name in parentheses


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is no such (living) process."""
    fields = _stat(pid)
    return None if fields is None or fields[_STATE] == "Z" else int(fields[_START])


def is_same_process(pid: int | None, ticks: int | None) -> bool:
    """Whether the process that was noted as `(pid, ticks)` is still running."""
    return pid is not None and ticks is not None and start_ticks(pid) == ticks


def carries(pid: int, nonce: str) -> bool:
    """Whether the process's command line, title or environment holds the nonce.

    vLLM's workers write their titles over both; its resource tracker keeps a command line of Python's own.
    """
    folder = _PROC / str(pid)
    try:
        return any(nonce.encode() in (folder / name).read_bytes() for name in ("cmdline", "environ"))
    except OSError:  # it ended meanwhile, or belongs to another user
        return False


def group_members(group: int) -> list[int]:
    """Living processes of a process group."""
    members = []
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields is not None and int(fields[_GROUP]) == group and fields[_STATE] != "Z":
                members.append(int(entry.name))
    return members


def end_group(group: int, *, grace_seconds: float = GRACE_SECONDS) -> None:
    """SIGTERM to every process of the group, SIGKILL to those that are left after the grace.

    The caller knows that the group is its own: its leader is an unreaped child, or was verified.
    """
    _signal_group(group, signal.SIGTERM)
    _signal_group(group, signal.SIGCONT)  # a stopped process would not see the first signal
    deadline = time.monotonic() + grace_seconds
    while group_members(group) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    _signal_group(group, signal.SIGKILL)
    while group_members(group) and time.monotonic() < deadline + GRACE_SECONDS:
        time.sleep(_POLL_SECONDS)


def end_leftovers(group: int, nonce: str, *, grace_seconds: float = GRACE_SECONDS) -> list[int]:
    """End the processes of `group` if every one of them carries the nonce; returns whom that met.

    A group whose id was reused by somebody else has members without the nonce: nobody is touched then.
    """
    members = group_members(group)
    if not members or not all(carries(pid, nonce) for pid in members):
        return []
    end_group(group, grace_seconds=grace_seconds)
    return members


def free_port() -> int:
    """A port of the loopback interface nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def check_port(port: int, *, where: str) -> None:
    """Raise UserError if somebody listens on `port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UserError(
                "the server's port is taken",
                where=where,
                value=port,
                expected="a free port",
                hint=f"leave it out and a free one is found, or stop who uses it ({error.strerror})",
            ) from error


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _stat(pid: int) -> list[str] | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()  # the name before may hold spaces and parentheses
