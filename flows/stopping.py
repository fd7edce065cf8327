"""SIGTERM as Ctrl-C: both end a command in the same orderly way."""

from __future__ import annotations

import signal
from types import FrameType


def sigterm_as_interrupt() -> None:
    """From now on SIGTERM raises KeyboardInterrupt in the main thread."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
