"""Stop requests: flags for loops, and signals that end a wait at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from ebft_core.stop import Interrupted, StopSignal, install_stop


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    asked = StopSignal()
    install_stop(asked)
    yield asked
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_ends_an_interruptible_wait_at_once(stop: StopSignal) -> None:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    began = time.monotonic()
    with pytest.raises(Interrupted, match="SIGTERM"), stop.interruptible():
        time.sleep(20.0)
    assert time.monotonic() - began < 5.0
    assert stop.requested


def test_outside_such_a_block_a_signal_only_sets_the_flag(stop: StopSignal) -> None:
    with stop.interruptible():
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.wait(5.0)
    assert "SIGTERM" in stop.reason


def test_a_block_behind_a_request_does_not_begin() -> None:
    asked = StopSignal()
    asked.request("enough")
    with pytest.raises(Interrupted, match="enough"), asked.interruptible():
        raise AssertionError("it began")


def test_in_another_thread_a_block_runs_to_its_end(stop: StopSignal) -> None:
    inside, go_on, finished = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        with stop.interruptible():
            inside.set()
            assert go_on.wait(10.0)
            finished.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(10.0)
    os.kill(os.getpid(), signal.SIGTERM)  # raises nothing in this, the main, thread
    assert stop.wait(5.0)
    go_on.set()
    thread.join(10.0)
    assert finished.is_set()
