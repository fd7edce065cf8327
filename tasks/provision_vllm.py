"""The vLLM server of a structured run: started for training, watched by its keeper, gone afterwards."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect.artifacts import create_table_artifact
from prefect.logging import get_run_logger

from ebft_core.config import RunConfig, load_config
from ebft_core.events import EventReader
from ebft_core.runs import RunPlan, read_plan
from ebft_core.vllm.identity import check_foreign
from ebft_core.vllm.serve import EVENTS
from ebft_core.vllm.state import ServerState, read_state, server_folder, write_state
from ebft_core.vllm.sweep import sweep_workspace
from tasks.observe import forward, notify
from tasks.stage_task import TransientError, artifact_key, check_inputs, stage_task
from tasks.supervise import POLL_SECONDS, check_exit, child_process, ended

NAME = "provision_vllm"


@dataclass
class _Keeper:
    """A keeper program that this process started; closing `stack` ends it."""

    process: subprocess.Popen[bytes]
    stack: contextlib.ExitStack
    log: Path
    reader: EventReader
    error: dict[str, Any] = field(default_factory=dict)

    def pump(self) -> None:
        """Hand on what the keeper reported."""
        for event in self.reader.read():
            if event["kind"] == "error":
                self.error.update(event["error"])
            forward(NAME, event)


_KEEPERS: dict[str, _Keeper] = {}
"""Run folder -> its keeper. A task returns JSON, so what has to be ended later is remembered here."""


@stage_task(NAME, "accelerator")
def provision_vllm(run_dir: str, base: dict[str, Any]) -> dict[str, Any]:
    """Return the state (`ebft_core.vllm.state.ServerState`) of a server that has answered a completion."""
    log = get_run_logger()
    check_inputs([base])
    notify(NAME, "started")
    for folder in sweep_workspace(read_plan(Path(run_dir)).workspace):
        log.info("ended the vLLM server that a killed run had left: %s", folder)
    state = ensure_server(run_dir)
    log.info("vLLM server ready at %s, model %s", state["url"], state["model_name"])
    rows = [{"what": key, "value": str(value)} for key, value in state.items() if value is not None]
    create_table_artifact(table=rows, key=artifact_key(NAME), description="vLLM server")
    notify(NAME, "done")
    return state


@contextlib.contextmanager
def vllm_server(run_dir: str, base: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
    """The run's server while the block runs; None, and nothing started, where the run needs none now."""
    if not server_needed(run_dir):
        yield None
        return
    try:
        yield provision_vllm(run_dir, base)
    finally:
        end_server(run_dir)


def server_needed(run_dir: str) -> bool:
    """Whether the run generates through a server and still has training to do."""
    plan, config = _read(run_dir)
    wanted = config.ebft.mode == "structured" and config.rollout.use_vllm
    return wanted and plan.stage("train").state != "done"


def ensure_server(run_dir: str) -> dict[str, Any]:
    """Return the state of the run's server; start it unless it is up. A retried training calls it again.

    Raises:
        UserError: the server cannot start, or the one of `vllm.url` does not suit.
        StageFailed: its keeper broke.
    """
    plan, config = _read(run_dir)
    if config.vllm.url is not None:
        folder = server_folder(plan.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        state = check_foreign(config)
        write_state(folder, state)
        return state.to_json()
    keeper = _KEEPERS.get(run_dir)
    if keeper is not None and ended(keeper.process):
        end_server(run_dir)
        keeper = None
    if keeper is None:
        keeper = _KEEPERS[run_dir] = _start_keeper(plan)
    return _ready(keeper, server_folder(plan.run_dir), run_dir).to_json()


def end_server(run_dir: str) -> None:
    """End the run's keeper, and with it the server and everything the server started."""
    keeper = _KEEPERS.pop(run_dir, None)
    if keeper is not None:
        keeper.stack.close()


def _start_keeper(plan: RunPlan) -> _Keeper:
    command = [sys.executable, "-m", "ebft_core.cli", "serve-vllm", "--run-dir", str(plan.run_dir)]
    log = plan.run_dir / "logs" / f"{EVENTS}.err.log"
    reader = EventReader(plan.run_dir / "events" / f"{EVENTS}.jsonl")
    for _ in reader.read():
        pass  # events of earlier attempts
    stack = contextlib.ExitStack()
    process = stack.enter_context(child_process(command, log, plan.working_dir))
    return _Keeper(process, stack, log, reader)


def _ready(keeper: _Keeper, folder: Path, run_dir: str) -> ServerState:
    """Wait for the keeper's server; the keeper gives up by itself (`vllm.startup_timeout`)."""
    while True:
        keeper.pump()
        state = read_state(folder)
        ours = state is not None and state.keeper_pid == keeper.process.pid
        if state is not None and ours and state.phase == "ready":
            return state
        if ended(keeper.process):
            keeper.pump()
            end_server(run_dir)
            check_exit(NAME, keeper.process.returncode, keeper.error, keeper.log)
            raise TransientError("the keeper of the vLLM server was stopped while it was starting")
        time.sleep(POLL_SECONDS)


def _read(run_dir: str) -> tuple[RunPlan, RunConfig]:
    plan = read_plan(Path(run_dir))
    return plan, load_config(plan.run_dir / "config.yaml")
