"""How a stage program learns that it should stop: a signal, or the death of its parent."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ebft_core.errors import ExitCode

SUPERVISED = "EBFT_SUPERVISED"
ORPHAN_GRACE = "EBFT_ORPHAN_GRACE"
ORPHAN_GRACE_SECONDS = 300.0


class Interrupted(BaseException):
    """A request to stop ended an `interruptible` block. Nothing that handles errors may swallow it."""


class StopSignal:
    """A flag that long loops look at. Once requested it stays so."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._interruptible = False
        self.reason = ""

    @property
    def requested(self) -> bool:
        """True once the stage should write a checkpoint and stop."""
        return self._event.is_set()

    def request(self, reason: str) -> None:
        """Ask to stop. The first reason is kept."""
        if not self._event.is_set():
            self.reason = reason
            self._event.set()

    def wait(self, seconds: float) -> bool:
        """Sleep unless asked to stop; returns `requested`."""
        return self._event.wait(seconds)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a signal end the block at once, for work that waits on others and leaves nothing half-done.

        Only the main thread receives signals; elsewhere the block runs to its end.

        Raises:
            Interrupted: a stop was requested before the block, or by a signal inside it.
        """
        if self.requested:
            raise Interrupted(self.reason)
        try:
            self._interruptible = threading.current_thread() is threading.main_thread()
            yield
        finally:
            self._interruptible = False

    def interrupt(self) -> None:
        """End the `interruptible` block that the main thread is in, if it is in one. For signal handlers."""
        if self._interruptible:
            self._interruptible = False
            raise Interrupted(self.reason)


def install_stop(stop: StopSignal) -> None:
    """Connect SIGTERM, SIGINT and, for a supervised program, the end of standard input to `stop`.

    A second signal ends the process at once. Call it from the main thread.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        stop.request(f"received {signal.Signals(number).name}")
        stop.interrupt()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    if os.environ.get(SUPERVISED) == "1":
        threading.Thread(target=_watch_parent, args=(stop,), daemon=True, name="parent-watch").start()


def _watch_parent(stop: StopSignal) -> None:
    """The parent holds the other end of stdin and writes nothing: end-of-file means that it died."""
    while os.read(sys.__stdin__.fileno() if sys.__stdin__ else 0, 4096):
        continue
    stop.request("the parent process died")
    time.sleep(float(os.environ.get(ORPHAN_GRACE, ORPHAN_GRACE_SECONDS)))
    # Nobody is left to kill a stage that does not listen, so it ends itself and what it started.
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(ExitCode.PREEMPTED)
