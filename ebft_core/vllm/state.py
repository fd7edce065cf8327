"""`<run-dir>/vllm/server.json`: where the run's server is, what it serves, how often it was restarted.

The keeper writes it, the trainer reads it, and the next start of the run finds in it what a killed one left.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ebft_core.manifests import write_json_atomic
from ebft_core.vllm.processes import is_same_process

FOLDER = "vllm"
STATE, WANTED, LOG, LOCK = "server.json", "wanted.json", "server.log", "keeper.lock"

Phase = Literal["starting", "ready", "restarting", "stopped", "failed"]
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class ServerState:
    """What is known about a server. Process fields are None for a server that the user runs.

    Args:
        url: `http://host:port`; the port stays the same over restarts.
        model_name: name of the base model in requests.
        phase: requests make sense while it is `ready`.
        generation: counts restarts; adapters loaded into an earlier generation are gone.
        error: why the phase is `failed`.
        nonce: the random part of `model_name`.
        keeper_pid, keeper_ticks: the keeper and when it started (see `processes.py`).
        server_pid, server_pgid, start_ticks: the server, its process group and when it started.
        model, model_digest: the weights' folder and digest.
        max_lora_rank: None where adapters are off.
        max_model_len: tokens of prompt plus completion.
        trainer_gpus: the trainer's CUDA_VISIBLE_DEVICES; None: unchanged.
        log: the server's output.
    """

    url: str
    model_name: str
    phase: Phase = "starting"
    generation: int = 0
    error: str | None = None
    nonce: str | None = None
    keeper_pid: int | None = None
    keeper_ticks: int | None = None
    server_pid: int | None = None
    server_pgid: int | None = None
    start_ticks: int | None = None
    model: str | None = None
    model_digest: str | None = None
    max_lora_rank: int | None = None
    max_model_len: int | None = None
    trainer_gpus: list[str] | None = None
    log: str | None = None

    @property
    def kept(self) -> bool:
        """Whether the server is the run's own; a user's server has no keeper."""
        return self.nonce is not None

    @property
    def keeper_alive(self) -> bool:
        """Whether the process that restarts the server still runs."""
        return is_same_process(self.keeper_pid, self.keeper_ticks)

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


class ServerLost(Exception):  # noqa: N818 (an outcome)
    """The run's server will not come back: its keeper gave up, or is gone."""


def server_folder(run_dir: Path) -> Path:
    """The server's folder inside a run's."""
    return run_dir / FOLDER


def write_state(folder: Path, state: ServerState) -> None:
    """Replace the state at once."""
    write_json_atomic(folder / STATE, state.to_json())


def read_state(folder: Path) -> ServerState | None:
    """The state; None if there is none or its form is another version's."""
    try:
        return ServerState(**json.loads((folder / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def wait_ready(
    folder: Path,
    *,
    timeout: float,
    generation: int = 0,
    serving: str | None = None,
    give_up: Callable[[], bool] = lambda: False,
) -> ServerState:
    """Wait until the server is ready in `generation` or a later one.

    Args:
        folder: `server_folder(run_dir)`.
        timeout: seconds.
        generation: after a `ServerGone` the last one seen plus 1, if the server was restarted meanwhile
            at all: a lost connection alone does not make a new generation.
        serving: a digest; wait until these weights are the ones served (see `want_model`).
        give_up: looked at while waiting; True ends the wait.

    Raises:
        ServerLost: it failed for good, the keeper is gone, or the time is over.
    """
    deadline = time.monotonic() + timeout
    while True:
        state = read_state(folder)
        if state is not None:
            if state.phase in ("failed", "stopped"):
                raise ServerLost(state.error or "the vLLM server was stopped")
            if state.kept and not state.keeper_alive:
                raise ServerLost(f"the keeper of the vLLM server is gone (its log: {state.log})")
            fits = state.generation >= generation and serving in (None, state.model_digest)
            if state.phase == "ready" and fits:
                return state
        if time.monotonic() > deadline or give_up():
            where = (
                f"phase {state.phase}, log: {state.log}" if state is not None else f"no {STATE} in {folder}"
            )
            raise ServerLost(f"the vLLM server was not ready within {timeout:.0f} s ({where})")
        time.sleep(_POLL_SECONDS)


def want_model(folder: Path, model: Path, digest: str) -> None:
    """Ask the keeper to serve other weights (full fine-tuning has no adapters to load)."""
    write_json_atomic(folder / WANTED, {"model": str(model), "digest": digest})


def wanted_model(folder: Path, state: ServerState) -> ServerState | None:
    """`state` with the weights that were asked for; None if it serves them already or nobody asked."""
    try:
        wanted = json.loads((folder / WANTED).read_text(encoding="utf-8"))
        model, digest = str(wanted["model"]), str(wanted["digest"])
    except (OSError, ValueError, KeyError):
        return None
    return None if digest == state.model_digest else replace(state, model=model, model_digest=digest)
