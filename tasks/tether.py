"""Runs a server that ends when its starter ends, however that happens.

`python -m tasks.tether COMMAND…` starts COMMAND in a session of its own (Ctrl-C at the terminal does
not reach it before the run has told it goodbye) and stops its whole process group on SIGTERM, SIGINT
or the end of standard input. Only the standard library is imported: this process lives beside each server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

GRACE_SECONDS = 10.0


def run_tethered(command: Sequence[str]) -> int:
    """Run `command` until it ends or until this process is told to stop; returns its exit code."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_watch_stdin, args=(stop,), daemon=True).start()
    while process.poll() is None and not stop.wait(0.2):
        continue
    _signal_group(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal_group(process.pid, signal.SIGKILL)
    return process.wait()


def _watch_stdin(stop: threading.Event) -> None:
    while os.read(0, 4096):
        continue
    stop.set()


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


if __name__ == "__main__":
    code = run_tethered(sys.argv[1:])
    sys.exit(128 - code if code < 0 else code)
