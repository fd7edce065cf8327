"""From the configuration to the server's command line and environment; what cannot work is refused here."""

from __future__ import annotations

import os
import secrets
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebft_core.base_model import read_model_config
from ebft_core.config import RunConfig
from ebft_core.config.structured_sections import LORA_RANKS
from ebft_core.errors import UserError
from ebft_core.vllm.gpus import GpuPlan, assign_gpus, visible_gpus
from ebft_core.vllm.processes import HOST

DEFAULT_PYTHON = Path(".venv-vllm/bin/python")
ENTRY = "vllm.entrypoints.openai.api_server"
NONCE = "EBFT_VLLM_NONCE"

_QUIET = {
    "DO_NOT_TRACK": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES")
_LOOK_SECONDS = 60.0
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vLLM's attention on a CPU


_CPU_BATCHED_TOKENS = 4096
"""Tokens of one pass of a server on the CPU, and more where a prompt may be longer."""


@dataclass(frozen=True)
class ServerSpec:
    """One server, decided but not started.

    Args:
        config: the run.
        python: interpreter of the environment that has vLLM.
        model: folder of the weights it serves.
        model_digest: their digest, as `ebft_core.base_model` computes it.
        nonce: random; part of the served name, so that nobody else's server is taken for this one.
        gpus: who has which GPU.
        max_model_len: tokens of prompt plus completion.
        max_lora_rank: None where adapters are off.
    """

    config: RunConfig
    python: Path
    model: Path
    model_digest: str
    nonce: str
    gpus: GpuPlan
    max_model_len: int
    max_lora_rank: int | None

    @property
    def served_name(self) -> str:
        """The model's name in requests."""
        return f"ebft-{self.nonce}"

    def command(self, port: int) -> list[str]:
        """The server's command line."""
        vllm = self.config.vllm
        command = [str(self.python), "-m", ENTRY, "--host", HOST, "--port", str(port)]
        command += ["--model", str(self.model), "--served-model-name", self.served_name]
        command += ["--dtype", vllm.dtype, "--max-model-len", str(self.max_model_len)]
        command += ["--seed", str(self.config.trainer.seed)]
        # Log-probabilities of the distribution that was sampled from, not of the one before temperature;
        # and sampling as the request says, whatever generation_config.json of the model would add.
        command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        command += ["--tensor-parallel-size", str(vllm.tensor_parallel_size)]
        command += ["--data-parallel-size", str(vllm.data_parallel_size)]
        command += ["--enable-prefix-caching" if vllm.enable_prefix_caching else "--no-enable-prefix-caching"]
        command += ["--disable-uvicorn-access-log"]  # a line per request would bury what matters
        command += ["--enforce-eager"] if vllm.enforce_eager else []
        if self.max_lora_rank is not None:
            # Two adapters in a batch: requests of the old version finish while the new one begins.
            command += ["--enable-lora", "--max-lora-rank", str(self.max_lora_rank), "--max-loras", "2"]
        if self.gpus.server:
            command += ["--gpu-memory-utilization", str(vllm.gpu_memory_utilization)]
        else:
            # A prompt cut into parts rolls a seeded generator back, which kills the engine on a CPU.
            batched = max(_CPU_BATCHED_TOKENS, self.max_model_len)
            command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(batched)]
        if self.config.model.trust_remote_code:
            command += ["--trust-remote-code"]
        return command

    def environment(self) -> dict[str, str]:
        """The server's whole environment."""
        kept = {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}
        own = {
            **_QUIET,
            "PYTHONUNBUFFERED": "1",
            NONCE: self.nonce,
            "VLLM_PROCESS_NAME_PREFIX": self.served_name,  # the titles of its workers: see `processes.py`
            "CUDA_VISIBLE_DEVICES": ",".join(self.gpus.server),
        }
        if self.max_lora_rank is not None:
            own["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        else:
            own["VLLM_SERVER_DEV_MODE"] = (
                "1"  # the endpoints that replace all weights; it listens on loopback
            )
        if not self.gpus.server:
            own["VLLM_CPU_KVCACHE_SPACE"] = str(self.config.vllm.cpu_kv_cache_gb)
        return {**kept, **own}


def make_spec(config: RunConfig, model: Path, model_digest: str) -> ServerSpec:
    """Decide everything about the run's own server.

    Raises:
        UserError: no interpreter, too few GPUs, an adapter rank or a length that cannot be served.
    """
    architecture = read_model_config(model)
    architecture = architecture.get("text_config", architecture)
    gpus = assign_gpus(config, visible_gpus())
    if not gpus.server:
        _check_cpu_heads(architecture, model)
    return ServerSpec(
        config=config,
        python=find_python(config.vllm.python),
        model=model,
        model_digest=model_digest,
        nonce=secrets.token_hex(6),
        gpus=gpus,
        max_model_len=model_length(config, architecture),
        max_lora_rank=lora_rank(config),
    )


def lora_rank(config: RunConfig) -> int | None:
    """The server's `--max-lora-rank`: the smallest one on offer that holds the run's adapters.

    Raises:
        UserError: `vllm.max_lora_rank` is too small for `lora.r`, or vLLM offers none that large.
    """
    if config.lora is None:
        return None
    rank, wanted = config.lora.r, config.vllm.max_lora_rank
    if wanted is not None and wanted < rank:
        raise UserError(
            "the server would refuse the run's adapters: their rank is larger",
            where="vllm.max_lora_rank, lora.r",
            value=f"{wanted} < {rank}",
            expected=f"at least {rank}, or null: the smallest that fits is then taken",
        )
    fitting = [offered for offered in LORA_RANKS if offered >= (wanted or rank)]
    if not fitting:
        raise UserError(
            "vLLM serves no adapter of this rank", where="lora.r", value=rank, expected=f"≤ {LORA_RANKS[-1]}"
        )
    return fitting[0]


def model_length(config: RunConfig, architecture: dict[str, Any]) -> int:
    """The server's `--max-model-len`. Raises UserError where it is beyond the model's positions."""
    wanted = config.vllm.max_model_len
    limit = architecture.get("max_position_embeddings")
    length = wanted or config.data.sequence_length + config.ebft.max_completion_length
    if not isinstance(limit, int) or length <= limit:
        return length
    if wanted is None:
        return limit
    raise UserError(
        "the model has fewer positions than the server shall serve",
        where="vllm.max_model_len",
        value=wanted,
        expected=f"≤ {limit}, the model's max_position_embeddings",
    )


def find_python(configured: str | None) -> Path:
    """The interpreter that runs the server.

    Raises:
        UserError: there is none, or it has no vLLM.
    """
    path = Path(configured).expanduser() if configured is not None else _default_python()
    path = path if path.is_absolute() else Path.cwd() / path  # not resolved: a venv's python is a link
    where = "vllm.python"
    if not os.access(path, os.X_OK) or path.is_dir():
        raise UserError(
            "there is no environment with vLLM",
            where=where,
            value=str(path),
            expected="the Python interpreter of an environment that has vLLM",
            hint="`make setup-vllm` makes .venv-vllm; `rollout.use_vllm: false` generates without a server",
        )
    look = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('vllm') else 3)"
    try:
        found = subprocess.run(
            [str(path), "-c", look], capture_output=True, timeout=_LOOK_SECONDS, check=False, cwd="/"
        ).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(
            "this is not a working Python interpreter", where=where, value=str(path), hint=str(error)
        ) from error
    if found != 0:
        raise UserError(
            "this environment has no vLLM",
            where=where,
            value=str(path),
            hint="`make setup-vllm` makes an environment that has it",
        )
    return path


def _default_python() -> Path:
    """`.venv-vllm` of the folder the run was started in, else of the repository this code is in."""
    here = Path.cwd() / DEFAULT_PYTHON
    beside_the_code = Path(__file__).parents[2] / DEFAULT_PYTHON
    return here if here.exists() or not beside_the_code.exists() else beside_the_code


def _check_cpu_heads(architecture: dict[str, Any], model: Path) -> None:
    heads = architecture.get("num_attention_heads")
    size = architecture.get("head_dim") or (heads and architecture.get("hidden_size", 0) // heads)
    if size and size not in _CPU_HEAD_SIZES:
        raise UserError(
            "vLLM's attention on a CPU does not have this head size",
            where=str(model / "config.json"),
            value=size,
            expected=f"one of {', '.join(map(str, _CPU_HEAD_SIZES))}",
            hint="for a model made here: `hidden_size` divided by `num_attention_heads`",
        )
