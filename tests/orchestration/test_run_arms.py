"""Arms in threads: how many at a time, on which GPU, what a failure does and what an interrupt does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ebft_core.errors import UserError
from flows import run_arms as module
from flows.run_arms import run_arms
from orchestration.builders import fake_command, planned_run
from tasks.observe import notify, observing
from tasks.supervise import STOPPING, StagePreempted, supervise


@pytest.fixture(autouse=True)
def not_stopping() -> Iterator[None]:
    yield
    STOPPING.clear()


def failing(error: Exception) -> Callable[[], dict[str, Any]]:
    def call() -> dict[str, Any]:
        raise error

    return call


def test_a_failed_arm_stops_no_other() -> None:
    trouble = UserError("no such module", where="lora.target_modules")
    calls = {"a": lambda: {"uri": "a"}, "b": failing(trouble), "c": lambda: {"uri": "c"}}
    outcomes = run_arms(calls, parallel=1)
    assert outcomes.models == {"a": {"uri": "a"}, "c": {"uri": "c"}}
    assert outcomes.failed == {"b": "no such module"}
    assert not STOPPING.is_set()


def test_if_every_arm_fails_the_first_error_comes_out() -> None:
    with pytest.raises(UserError, match="first"):
        run_arms({"a": failing(UserError("first")), "b": failing(ValueError("second"))}, parallel=2)


@pytest.mark.parametrize("parallel", [1, 2, 3])
def test_so_many_run_at_a_time_and_no_more(parallel: int) -> None:
    lock, running, most = threading.Lock(), [0], [0]

    def call() -> dict[str, Any]:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.05)
        with lock:
            running[0] -= 1
        return {}

    run_arms({str(number): call for number in range(7)}, parallel=parallel)
    assert most[0] == parallel


def test_events_carry_the_name_of_their_arm_and_what_all_share_is_not_repeated() -> None:
    seen: list[str] = []

    def call() -> dict[str, Any]:
        notify("tokenize", "skipped")
        notify("train", "started")
        notify("report", "started")
        return {}

    with observing(lambda stage, event: seen.append(stage)):
        run_arms({"ce_coef=0": call, "ce_coef=1": call}, parallel=2)
        notify("compare", "started")
    assert sorted(seen) == ["ce_coef=0 · train", "ce_coef=1 · train", "compare"]


@pytest.mark.parametrize(
    ("gpus", "parallel", "expected"),
    [(("4", "7"), 2, {"4", "7"}), (("4", "7"), 1, {""}), ((), 2, {""})],
)
def test_stage_programs_of_parallel_arms_see_one_gpu_each(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: tuple[str, ...],
    parallel: int,
    expected: set[str],
) -> None:
    monkeypatch.setattr(module, "visible_gpus", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    together = threading.Barrier(parallel)

    def arm(name: str) -> Callable[[], dict[str, Any]]:
        out = tmp_path / name

        def call() -> dict[str, Any]:
            together.wait(20)
            command = ["sh", "-c", f'printf "%s" "$CUDA_VISIBLE_DEVICES" > {out}']
            supervise(command, stage="train", run_dir=tmp_path / f"run-{name}", on_event=lambda _: None)
            return {}

        return call

    names = [str(number) for number in range(parallel)]
    run_arms({name: arm(name) for name in names}, parallel=parallel)
    assert {(tmp_path / name).read_text() for name in names} == expected


def test_an_interrupt_ends_the_stages_of_every_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread alone is interrupted; the stage runs in another one."""
    plan = planned_run(tmp_path)
    started, ended = threading.Event(), []

    def call() -> dict[str, Any]:
        command = fake_command("prepare_base", plan.run_dir, "listen")
        try:
            supervise(command, stage="prepare_base", run_dir=plan.run_dir, on_event=lambda _: started.set())
        except StagePreempted as error:
            ended.append(str(error))
            raise
        return {}

    def interrupted(_: Any) -> None:
        assert started.wait(30)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_arms({"a": call, "b": lambda: {}}, parallel=1)
    assert ended == ["stage prepare_base was stopped with its parent"]
