"""Training against the stub with true weights: versions, staleness, and every accident on the way.

The stub's numbers depend on the request alone, so an accident that is mended must leave no trace in the
losses: each step trains once, on the completions it would have had.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebft_core.stage_runner import Preempted
from ebft_core.stop import StopSignal
from ebft_core.trainers.checkpoints import newest_checkpoint
from ebft_core.vllm.client import ServerGone
from ebft_core.vllm.state import ServerLost, read_state, server_folder, write_state
from tasks import provision_vllm as provision
from tasks.supervise import child_process, ended, stage_command
from tests.vllm_server.builders import Kept, inject, processes_with, stub_python, true_model
from tests.vllm_server.training import Training, kept_for_training, planned_training, served_by

EXACT = 1e-3
"""Largest difference of log-probabilities of two float32 programs."""
STEPS = [1, 2, 3, 4]
DEPTHS = pytest.mark.parametrize("depth", [0, 1], ids=["sync", "async"])

Make = Callable[..., Training]
Fault = Callable[[Kept], None]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    folder = tmp_path_factory.mktemp("server")
    model, _ = true_model(folder)
    with kept_for_training(folder, model, stub_python(folder, folder / "faults.json")) as holder:
        yield holder


@pytest.fixture
def make(server: Kept, tmp_path: Path) -> Iterator[Make]:
    """Runs against the server that all tests share."""

    def planned(**sections: Any) -> Training:
        return served_by(
            planned_training(tmp_path, server.spec.model, server.spec.python, **sections), server
        )

    server.ready()
    yield planned
    inject(server.faults)


@pytest.fixture(scope="module")
def undisturbed(server: Kept, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Training]:
    """A finished run of each depth without any accident."""
    runs = {}
    for depth in (0, 1):
        folder = tmp_path_factory.mktemp("undisturbed")
        sections = {"rollout": {"prefetch_depth": depth, "request_timeout": 30.0}}
        run = planned_training(folder, server.spec.model, server.spec.python, **sections)
        served_by(run, server).train()
        runs[depth] = run
    return runs


@DEPTHS
def test_versions_lag_and_canary(undisturbed: dict[int, Training], depth: int) -> None:
    run = undisturbed[depth]
    assert run.steps() == STEPS
    assert run.series("sync/version") == [0, 1, 2, 3]
    assert run.series("policy_lag") == [0, depth, depth, depth]
    assert max(run.series("sync/canary")) < EXACT
    ratios = run.series("rollout/is_ratio_mean")
    assert ratios[0] == pytest.approx(1.0, abs=EXACT)
    # Ratios are exactly one where the weights are the sampler's, and move where those are a step older.
    assert (max(run.series("rollout/is_ratio_max")) > 1 + EXACT) == bool(depth)
    assert len(set(run.series("train/loss"))) == len(STEPS)


def kill(server: Kept) -> None:
    os.kill(int(server.state().server_pid or 0), signal.SIGKILL)


def hang(server: Kept) -> None:
    """Only this start: the next one is well."""
    starts = server.faults.with_suffix(".starts").read_text().splitlines()
    inject(server.faults, hang=True, only_start=len(starts) - 1)


@pytest.mark.parametrize(("fault", "depth"), [(kill, 1), (hang, 0)], ids=["killed, async", "hung, sync"])
def test_a_server_that_is_lost_leaves_no_trace(
    make: Make, server: Kept, undisturbed: dict[int, Training], fault: Fault, depth: int
) -> None:
    run, before = make(rollout={"prefetch_depth": depth}), server.state().generation

    def accident(step: int) -> None:
        if step == 2:
            fault(server)

    run.train(accident)
    assert server.state().generation == before + 1
    assert run.steps() == STEPS
    assert run.series("sync/version") == [0, 1, 2, 3]
    assert run.series("rollout/failed_prompts") == [0, 0, 0, 0]
    assert run.series("train/loss") == pytest.approx(undisturbed[depth].series("train/loss"), rel=1e-5)


def test_bursts_of_errors_are_sat_out(make: Make, server: Kept, undisturbed: dict[int, Training]) -> None:
    run, before = make(rollout={"request_attempts": 4}), server.state().generation

    def burst(step: int) -> None:
        kinds = {1: "503", 2: "reset", 3: "cut"}
        if step in kinds:
            inject(server.faults, fail={"/v1/completions": {"kind": kinds[step], "times": 2}})

    run.train(burst)
    assert server.state().generation == before
    assert run.steps() == STEPS
    assert run.series("train/loss") == pytest.approx(undisturbed[0].series("train/loss"), rel=1e-5)


def test_errors_without_end_end_the_stage(make: Make, server: Kept) -> None:
    run = make()

    def broken(step: int) -> None:
        inject(server.faults, fail={"/v1/completions": {"kind": "500", "times": 10**6}})

    with pytest.raises(ServerGone, match="500"):
        run.train(broken)
    assert run.steps() == [1]


def test_a_refused_adapter_is_the_users_to_mend(make: Make, server: Kept) -> None:
    run = make()
    said = run.refused(lambda step: inject(server.faults, refuse_lora="rank 4 is more than I take"))
    assert "the server refuses the policy's adapter" in said
    assert "rank 4 is more than I take" in said
    assert "--max-lora-rank" in said
    assert run.steps() == [1]


@DEPTHS
def test_a_resumed_run_publishes_the_checkpoints_adapter_first(
    make: Make, undisturbed: dict[int, Training], depth: int
) -> None:
    run, stop = make(rollout={"prefetch_depth": depth}), StopSignal()
    with pytest.raises(Preempted):
        run.train(lambda step: stop.request("enough") if step == 2 else None, stop)
    assert run.steps() == [1, 2]
    run.train()
    assert run.steps() == STEPS
    assert run.series("sync/version") == [0, 1, 2, 3]
    assert max(run.series("sync/canary")) < EXACT
    assert run.series("policy_lag") == [0, depth, 0, depth]  # what was written ahead is gone
    if depth == 0:
        assert run.series("train/loss") == pytest.approx(undisturbed[0].series("train/loss"), rel=1e-5)


@pytest.fixture
def provided(server: Kept, tmp_path: Path) -> Iterator[Training]:
    """A run with a keeper program of its own, as the flow starts it."""
    inject(tmp_path / "faults.json")
    python = stub_python(tmp_path, tmp_path / "faults.json")
    run = planned_training(tmp_path, server.spec.model, python, trainer={"save_every": 50})
    provision.ensure_server(str(run.plan.run_dir))
    yield run
    provision.end_server(str(run.plan.run_dir))


def test_a_keeper_that_is_gone_ends_the_stage_and_names_its_log(provided: Training) -> None:
    state = read_state(server_folder(provided.plan.run_dir))
    assert state is not None

    def kill_keeper(step: int) -> None:
        os.kill(int(state.keeper_pid or 0), signal.SIGKILL)

    with pytest.raises(ServerLost, match=r"the keeper of the vLLM server is gone \(its log: .*vllm.*\)"):
        provided.train(kill_keeper)
    assert provided.steps() == [1]


def test_a_cancelled_run_leaves_a_checkpoint_and_no_process(provided: Training, tmp_path: Path) -> None:
    run_dir = provided.plan.run_dir
    state = read_state(server_folder(run_dir))
    assert state is not None
    log = run_dir / "logs" / "train.err.log"
    with child_process(stage_command("train", run_dir), log, provided.plan.working_dir) as program:
        while not provided.steps():
            assert not ended(program), log.read_text()
            time.sleep(0.05)
        inject(tmp_path / "faults.json", slow=30.0)  # from now on completions take minutes
        time.sleep(1.0)
        done = provided.steps()[-1]
        began = time.monotonic()
        program.terminate()
        while not ended(program) and time.monotonic() < began + 20.0:
            time.sleep(0.05)
        waited = time.monotonic() - began
    assert program.returncode == 75, log.read_text()
    assert waited < 8.0
    provision.end_server(str(run_dir))
    assert processes_with(state.nonce) == []
    found = newest_checkpoint(provided.plan.stage("train").work / "checkpoints")
    assert found is not None
    assert found.name == f"checkpoint-{done}"


def test_waiting_for_a_server_that_restarts_can_be_stopped(make: Make, server: Kept) -> None:
    run = make()
    folder = server_folder(run.plan.run_dir)
    folder.unlink()  # not the server of all tests
    folder.mkdir()
    write_state(folder, replace(server.state(), phase="restarting"))
    stop = StopSignal()

    def on_alarm(number: int, frame: object) -> None:
        stop.request("the test says so")
        stop.interrupt()

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, 3.0)
    try:
        with pytest.raises(Preempted, match="while the vLLM server was waited for"):
            run.train(stop=stop)
    finally:
        signal.signal(signal.SIGALRM, before)
