"""Runs, models and interpreters for the tests of the vLLM server; other suites start the stub with these."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ebft_core.config import RunConfig, parse_config
from ebft_core.events import EventWriter
from ebft_core.samplers.vllm import connect
from ebft_core.stop import StopSignal
from ebft_core.vllm.client import VLLMClient
from ebft_core.vllm.keeper import Keeper
from ebft_core.vllm.processes import carries, free_port
from ebft_core.vllm.spec import ServerSpec, make_spec
from ebft_core.vllm.state import ServerState, read_state

STUB = Path(__file__).with_name("stub_server.py")
REAL_PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
REAL_SERVER = [  # a file's `pytestmark` where it needs the real thing
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not REAL_PYTHON.exists(), reason="needs the real vLLM server: make setup-vllm"),
]
VOCABULARY = 40
QUICK = {"startup_timeout": 20.0, "health_interval": 0.2, "hang_timeout": 1.5}


def stub_python(folder: Path, faults: Path | None = None) -> Path:
    """An "interpreter" for `vllm.python` that runs the stub instead of vLLM."""
    script = folder / "python-of-the-stub"
    setting = f"export EBFT_STUB_FAULTS={shlex.quote(str(faults))}" if faults is not None else ":"
    run = shlex.join([sys.executable, str(STUB)])
    script.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 0\n{setting}\nshift 2\nexec {run} "$@"\n')
    script.chmod(0o755)
    return script


def made_up_model(folder: Path, **changes: Any) -> Path:
    """A model folder without weights: enough for the stub."""
    model = folder / "made-up-model"
    model.mkdir(exist_ok=True)
    config = {"model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 64, "num_attention_heads": 2}
    config |= {"max_position_embeddings": 512, "architectures": ["LlamaForCausalLM"], **changes}
    (model / "config.json").write_text(json.dumps(config))
    return model


def true_model(folder: Path, *, lora_rank: int = 4, spread: float = 0.2) -> tuple[Path, Path]:
    """A tiny Llama that vLLM can serve (heads of 32) with a byte tokenizer, and an adapter that matters.

    `spread` is the standard deviation of its weights: the larger, the larger the logits.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.data.builders import byte_tokenizer
    from tests.oracles.tiny_models import with_lora

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=258,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=256,
            initializer_range=spread,
            bos_token_id=256,
            eos_token_id=256,
            pad_token_id=257,
        )
    )
    model.save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    with_lora(model, rank=lora_rank).save_pretrained(folder / "adapter")
    return folder / "model", folder / "adapter"


def served_config(python: Path | str | None = None, **sections: Any) -> RunConfig:
    """A run file whose server starts quickly; `section={...}` changes it."""
    document: dict[str, Any] = {
        "model": {"name_or_path": "unused"},
        "data": {"sources": [{"path": "unused.txt"}], "sequence_length": 64},
        "ebft": {"max_completion_length": 32},
        "lora": {"r": 4, "alpha": 8.0},
        "vllm": {**QUICK, "python": None if python is None else str(python)},
    }
    for name, values in sections.items():
        current = document.get(name)
        both = isinstance(current, dict) and isinstance(values, dict)
        document[name] = {**current, **values} if both else values  # type: ignore[dict-item]
    return parse_config(document, origin="test")


@dataclass
class Kept:
    """A keeper that runs in a thread of the test."""

    folder: Path
    events: Path
    spec: ServerSpec
    faults: Path
    stop: StopSignal
    thread: threading.Thread
    error: Exception | None = None

    def state(self) -> ServerState:
        state = read_state(self.folder)
        assert state is not None
        return state

    def until(self, condition: Callable[[ServerState], bool], seconds: float = 20.0) -> ServerState:
        """Wait for a state; fails loudly if the keeper ends before."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            state = read_state(self.folder)
            if state is not None and condition(state):
                return state
            assert self.thread.is_alive(), f"the keeper ended: {self.error}"
            time.sleep(0.02)
        raise AssertionError(f"waited {seconds} s, state: {read_state(self.folder)}")

    def ready(self, generation: int = 0, seconds: float = 20.0) -> ServerState:
        return self.until(lambda s: s.phase == "ready" and s.generation >= generation, seconds)

    def client(self, **options: Any) -> VLLMClient:
        state = self.state()
        return VLLMClient(state.url, state.model_name, **{"timeout": 10.0, "attempts": 1, **options})

    def connect(self) -> VLLMClient:
        """A client as a run makes it."""
        state = self.state()
        return connect(state.url, state.model_name, self.spec.config)

    def kill(self) -> None:
        """Kill the server, not its keeper."""
        os.kill(int(self.state().server_pid or 0), signal.SIGKILL)

    def end(self) -> None:
        self.stop.request("the test is over")
        self.thread.join(30.0)
        assert not self.thread.is_alive()


@contextmanager
def kept(
    tmp_path: Path,
    *,
    faults: dict[str, Any] | None = None,
    config: RunConfig | None = None,
    model: Path | None = None,
) -> Iterator[Kept]:
    """A keeper of a stub server (or of what `config` names); ended, and looked after, at the end."""
    fault_file = tmp_path / "faults.json"
    fault_file.write_text(json.dumps(faults or {}))
    config = config or served_config(stub_python(tmp_path, fault_file))
    spec = make_spec(config, model or made_up_model(tmp_path), "digest")
    stop, folder = StopSignal(), tmp_path / "run" / "vllm"
    events = tmp_path / "run" / "events" / "vllm.jsonl"
    keeper = Keeper(spec, folder, events=EventWriter(events, "vllm"), stop=stop)
    holder = Kept(folder, events, spec, fault_file, stop, threading.Thread())

    def run() -> None:
        try:
            keeper.run()
        except Exception as error:  # noqa: BLE001 (kept for the test to look at)
            holder.error = error

    holder.thread = threading.Thread(target=run, daemon=True)
    holder.thread.start()
    try:
        yield holder
    finally:
        holder.end()
        assert processes_with(spec.nonce) == []


def processes_with(nonce: str) -> list[int]:
    """Every process of the machine that belongs to the server with this nonce."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if carries(pid, nonce)]


@contextmanager
def running_stub(
    tmp_path: Path, *, faults: dict[str, Any] | None = None, lora: bool = True, model: Path | None = None
) -> Iterator[tuple[str, Path]]:
    """A stub without a keeper, as a server that the user runs: its address and its fault file."""
    fault_file = tmp_path / "faults.json"
    fault_file.write_text(json.dumps(faults or {}))
    port = free_port()
    command = [
        str(stub_python(tmp_path, fault_file)),
        "-m",
        "vllm",
        "--port",
        str(port),
        "--max-model-len",
        "96",
    ]
    command += ["--model", str(model or made_up_model(tmp_path)), "--served-model-name", "theirs"]
    command += ["--enable-lora", "--max-lora-rank", "8"] if lora else []
    environment = {"PATH": "/usr/bin:/bin"} | ({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if lora else {})
    process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    client = VLLMClient(url, "theirs", timeout=2.0, attempts=1)
    try:
        deadline = time.monotonic() + 20.0
        while not client.health(timeout=0.5) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield url, fault_file
    finally:
        client.close()
        end_group_of(process)


def end_group_of(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def inject(faults: Path, **wanted: Any) -> None:
    """Replace the faults at once."""
    temporary = faults.with_suffix(".tmp")
    temporary.write_text(json.dumps(wanted))
    temporary.replace(faults)
