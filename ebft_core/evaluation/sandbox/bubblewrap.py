"""Start one generated program in a sandbox and collect its reports.

bubblewrap gives it namespaces of its own (user, process, network, IPC, host name): no network but a loopback
without neighbours, no other process to be seen, a file system of the interpreter and the system's libraries,
read-only, and a small private `/tmp`. No home, no `/etc`, no `/proc`, no variable of the environment. The
parent keeps the clock, and the kernel ends everything inside when the outermost process is killed.
"""

from __future__ import annotations

import json
import math
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from ebft_core.config import SandboxConfig
from ebft_core.evaluation.sandbox import harness
from ebft_core.evaluation.sandbox.checks import Checks
from ebft_core.evaluation.sandbox.seccomp import seccomp_filter

REPORT_BYTES = 2**20
"""Most that a program may report; tests of ordinary size report far less."""

_MB = 2**20
_OPEN_FILES = 32
_START_SECONDS = 60.0  # on a machine that is busy with other things
_NOBODY = "65534"
_VARIABLES = {"HOME": "/tmp", "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0"}
_SYSTEM_FOLDERS = ("/bin", "/lib", "/lib64", "/sbin")
_COMPLAINT_CHARACTERS = 500


class SandboxError(RuntimeError):
    """The sandbox did not come up: this says nothing about the program."""


@dataclass(frozen=True)
class Outcome:
    """What came out of the sandbox.

    Attributes:
        reports: lines of JSON, see `harness.py`; written by code that nobody trusts.
        end: why it is over.
        status: exit status of the sandbox; meaningful if it exited by itself.
    """

    reports: bytes
    end: Literal["exited", "timeout", "flooded"]
    status: int


def run_sandboxed(program: str, checks: Checks, bounds: SandboxConfig) -> Outcome:
    """Run `program`, then its tests.

    Raises:
        SandboxError: the sandbox did not come up.
    """
    reading, writing = os.pipe()
    with (
        tempfile.TemporaryFile() as job,
        tempfile.TemporaryFile() as rules,
        tempfile.TemporaryFile() as complaints,
    ):
        try:
            _fill(job, json.dumps(_job(program, checks, bounds, writing)).encode())
            _fill(rules, seccomp_filter())
            process = subprocess.Popen(
                list(_command(rules.fileno(), bounds)),
                stdin=job,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
                pass_fds=(writing, rules.fileno()),
                env=_VARIABLES,
                cwd="/",
                start_new_session=True,  # Ctrl-C in the terminal is no verdict
            )
        except OSError as error:
            os.close(reading)
            raise SandboxError(str(error)) from error
        finally:
            os.close(writing)
        try:
            outcome = _watch(process, reading, bounds.timeout_seconds)
        finally:
            os.close(reading)
            _end(process)
        if not outcome.reports.startswith(b'{"event": "start"}\n'):
            complaints.seek(0)
            said = complaints.read().decode(errors="replace").strip()[-_COMPLAINT_CHARACTERS:]
            raise SandboxError(said or f"it did not start: {outcome.end}, status {outcome.status}")
    return outcome


def _job(program: str, checks: Checks, bounds: SandboxConfig, reports: int) -> dict[str, object]:
    # Of all threads together, and more than can be used before the parent's clock ends it.
    cpu_seconds = (math.ceil(bounds.timeout_seconds) + 1) * (os.cpu_count() or 1)
    limits = {
        "RLIMIT_CPU": cpu_seconds,
        "RLIMIT_AS": bounds.memory_mb * _MB,
        "RLIMIT_FSIZE": bounds.disk_mb * _MB,
        "RLIMIT_NOFILE": _OPEN_FILES,
        "RLIMIT_CORE": 0,
    }
    return {"program": program, "tests": checks.source, "limits": limits, "reports": reports}


def _command(rules: int, bounds: SandboxConfig) -> Iterator[str]:
    prefix = Path(sys.base_prefix).resolve()
    python = prefix / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    # A session of its own: kill(0, …) reaches a whole process group, also what lies outside the namespace.
    yield from (
        shutil.which("bwrap") or "bwrap",
        "--die-with-parent",
        "--new-session",
        "--cap-drop",
        "ALL",
        "--hostname",
        "sandbox",
    )
    yield from ("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts")
    yield from ("--unshare-cgroup-try", "--uid", _NOBODY, "--gid", _NOBODY)
    yield from ("--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache")
    for folder in map(Path, _SYSTEM_FOLDERS):
        if folder.is_symlink():
            yield from ("--symlink", str(folder.readlink()), str(folder))
        else:
            yield from ("--ro-bind-try", str(folder), str(folder))
    if not prefix.is_relative_to("/usr"):
        yield from ("--ro-bind", str(prefix), str(prefix))
    yield from ("--dev", "/dev", "--remount-ro", "/dev")
    yield from ("--size", str(bounds.disk_mb * _MB), "--tmpfs", "/tmp", "--chdir", "/tmp")
    yield from ("--remount-ro", "/", "--seccomp", str(rules), "--")
    yield from (str(python), "-s", "-S", "-P", "-B", "-c", Path(harness.__file__).read_text(encoding="utf-8"))


def _watch(process: subprocess.Popen[bytes], reading: int, seconds: float) -> Outcome:
    """Read the reports to their end, within the bounds of length and time; time runs from the first one."""
    reports, poll, deadline = bytearray(), select.poll(), time.monotonic() + _START_SECONDS
    poll.register(reading)
    while len(reports) <= REPORT_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            return Outcome(bytes(reports), "timeout", -1)
        part = os.read(reading, 2**16)
        if not part:
            break
        if not reports:
            deadline = time.monotonic() + seconds
        reports += part
    else:
        return Outcome(bytes(reports), "flooded", -1)
    try:
        status = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return Outcome(bytes(reports), "timeout", -1)
    return Outcome(bytes(reports), "exited", status)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the outermost process: the first one inside dies with it, and all others with that."""
    process.kill()
    process.wait()


def _fill(file: IO[bytes], content: bytes) -> None:
    file.write(content)
    file.seek(0)
