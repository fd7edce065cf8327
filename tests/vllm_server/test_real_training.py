"""Twenty steps against the real server: on policy, one step ahead, in bfloat16, and with an accident."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_server.builders import REAL_PYTHON, REAL_SERVER, Kept, processes_with, true_model
from tests.vllm_server.training import Training, kept_for_training, planned_training, served_by

pytestmark = REAL_SERVER

STEPS = 20
TOLERANCE = {"float32": 2e-3, "bfloat16": 2e-2}
"""Mean difference of the log-probabilities of server and trainer."""
SPREAD = {"float32": 0.2, "bfloat16": 0.1}
LEARNING_RATE = {"float32": 3e-3, "bfloat16": 1e-3}
"""The roundings of bfloat16 grow with the logits: logits between 4 and 8 are multiples of 1/32."""
DETECTED_SECONDS = 15.0


def sections(dtype: str, depth: int = 0) -> dict[str, dict[str, Any]]:
    trainer = {"max_steps": STEPS, "save_every": 10, "precision": dtype}
    return {
        "trainer": {**trainer, "learning_rate": LEARNING_RATE[dtype]},
        "ebft": {"max_completion_length": 12},
        "rollout": {"prefetch_depth": depth, "request_timeout": 120.0},
        "vllm": {
            "dtype": dtype, "enforce_eager": True, "startup_timeout": 300.0, "health_interval": 3.0,
            "hang_timeout": 20.0,
        },
    }  # fmt: skip


@contextmanager
def served(folder: Path, dtype: str) -> Iterator[Kept]:
    """A server for several runs; afterwards no process of it is left (`kept` looks)."""
    model, _ = true_model(folder, spread=SPREAD[dtype])
    with kept_for_training(folder, model, REAL_PYTHON, **sections(dtype)) as holder:
        yield holder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    with served(tmp_path_factory.mktemp("float32"), "float32") as holder:
        yield holder


def planned(folder: Path, server: Kept, dtype: str = "float32", depth: int = 0) -> Training:
    run = planned_training(folder, server.spec.model, REAL_PYTHON, **sections(dtype, depth))
    return served_by(run, server)


def check(run: Training, depth: int, tolerance: float) -> None:
    """Every step once, every version once, and the same log-probabilities on both sides."""
    assert run.steps() == list(range(1, STEPS + 1))
    assert run.series("sync/version") == list(range(STEPS))
    assert run.series("policy_lag") == [0.0] + [float(depth)] * (STEPS - 1)
    assert run.series("rollout/failed_prompts") == [0.0] * STEPS
    assert max(run.series("sync/canary")) < tolerance
    ratios = run.series("rollout/is_ratio_mean")
    assert ratios[0] == pytest.approx(1.0, abs=tolerance)
    if depth == 0:
        assert ratios == pytest.approx([1.0] * STEPS, abs=tolerance)


@pytest.mark.parametrize("depth", [0, 1], ids=["sync", "async"])
def test_twenty_steps(server: Kept, tmp_path: Path, depth: int) -> None:
    run = planned(tmp_path, server, depth=depth)
    run.train()
    check(run, depth, TOLERANCE["float32"])


def test_a_server_killed_on_the_way(server: Kept, tmp_path: Path) -> None:
    run, before = planned(tmp_path, server, depth=1), server.state()
    killed: list[float] = []

    def kill(step: int) -> None:
        if step == 8:
            killed.append(time.monotonic())
            os.kill(int(server.state().server_pid or 0), signal.SIGKILL)
            server.until(lambda state: state.generation > before.generation, DETECTED_SECONDS)

    run.train(kill)
    assert killed
    assert server.state().generation == before.generation + 1
    check(run, 1, TOLERANCE["float32"])


def test_bfloat16_agrees_and_leaves_nobody(tmp_path: Path) -> None:
    with served(tmp_path, "bfloat16") as server:
        run = planned(tmp_path / "run", server, "bfloat16")
        run.train()
        nonce = server.spec.nonce
    check(run, 0, TOLERANCE["bfloat16"])
    assert processes_with(nonce) == []
