"""Becomes a program, and leaves a guard beside it: `guarded_exec.py FD COMMAND…`.

FD is the reading end of a pipe whose other end only the starter holds. However the starter ends, the guard
reads the end of the pipe and ends the process group: a server must not outlive its keeper, even a killed one.
(The kernel's own PR_SET_PDEATHSIG reaches one process, and a starting vLLM is deaf to SIGTERM.)

Run as a file with `python -I -S`, standard library only: it is the first moment of every server. The program
keeps this process's id, so the starter watches the program itself and not a wrapper.
"""

from __future__ import annotations

import os
import signal
import sys
import time

GRACE_SECONDS = 6.0
_LAST_SECONDS = 0.5


def main(arguments: list[str]) -> None:
    """Fork the guard and become COMMAND."""
    pipe, command = int(arguments[0]), arguments[1:]
    if os.fork() == 0:
        _guard(pipe)
    os.close(pipe)
    os.execv(command[0], command)


def _guard(pipe: int) -> None:
    """Wait for the end of the pipe, then SIGTERM and SIGKILL to the group, this process included."""
    program = os.getppid()
    while os.read(pipe, 1):
        continue
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while os.getppid() == program and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(_LAST_SECONDS)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
