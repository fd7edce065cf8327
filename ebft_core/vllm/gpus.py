"""Which GPUs are the server's and which are the trainer's.

The two sets are disjoint unless the run file declares that they share (`vllm.colocate`). Devices are named
as CUDA_VISIBLE_DEVICES names them, so a restricted set handed to the run is divided, never left.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ebft_core.config import RunConfig
from ebft_core.errors import UserError, UserErrors

_QUERY_SECONDS = 20.0
_DEVICE = re.compile(r"nvidia\d+")


@dataclass(frozen=True)
class GpuPlan:
    """A division of the visible GPUs.

    Args:
        server: the server's devices; none: it runs on the CPU.
        trainer: the trainer's devices; None: whatever it sees.
    """

    server: tuple[str, ...]
    trainer: tuple[str, ...] | None


def visible_gpus() -> tuple[str, ...]:
    """The NVIDIA GPUs this process may use, as CUDA_VISIBLE_DEVICES names them; asks no CUDA library."""
    count = _count()
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None or count == 0:
        return tuple(str(index) for index in range(count))
    names = [name.strip() for name in allowed.split(",") if name.strip()]
    return tuple(names[: names.index("-1")] if "-1" in names else names)  # CUDA stops reading at -1


def assign_gpus(config: RunConfig, visible: Sequence[str]) -> GpuPlan:
    """Divide the visible GPUs between server and trainer.

    Raises:
        UserError: there are too few, or an index is beyond them.
    """
    vllm = config.vllm
    needed = vllm.tensor_parallel_size * vllm.data_parallel_size
    problems = list(_impossible(config, visible, needed))
    if problems:
        raise UserErrors(problems)
    if not visible:
        return GpuPlan((), None)
    indices = vllm.gpus if vllm.gpus is not None else range(len(visible) - needed, len(visible))
    server = tuple(visible[index] for index in indices)
    if config.trainer.device == "cpu" or vllm.colocate:
        return GpuPlan(server, None)
    rest = tuple(gpu for gpu in visible if gpu not in server)
    if not rest:
        raise UserError(
            "the server would take every GPU and leave none to the trainer",
            where="vllm.tensor_parallel_size, vllm.colocate",
            value=f"{needed} of {len(visible)} visible GPU(s)",
            expected=f"at most {len(visible) - 1} GPU(s) for the server, or shared ones",
            hint="`vllm.colocate: true` with `vllm.gpu_memory_utilization: 0.4` lets both share, "
            "`trainer.device: cpu` keeps the trainer off the GPUs",
        )
    return GpuPlan(server, rest)


def _impossible(config: RunConfig, visible: Sequence[str], needed: int) -> Iterator[UserError]:
    vllm = config.vllm
    parallel = "vllm.tensor_parallel_size, vllm.data_parallel_size"
    if not visible and vllm.gpus is not None:
        yield UserError(
            "no GPU is visible, so the server cannot have any",
            where="vllm.gpus",
            value=vllm.gpus,
            expected="null on a machine without an NVIDIA GPU",
            hint="CUDA_VISIBLE_DEVICES hides GPUs; `nvidia-smi -L` lists them",
        )
    elif not visible and needed > 1:
        yield UserError(
            "the server runs on the CPU here, in one copy",
            where=parallel,
            value=f"{vllm.tensor_parallel_size} x {vllm.data_parallel_size}",
            expected="1 and 1 where no GPU is visible",
        )
    elif visible and needed > len(visible):
        yield UserError(
            "the server asks for more GPUs than are visible",
            where=parallel,
            value=f"{vllm.tensor_parallel_size} x {vllm.data_parallel_size} = {needed}",
            expected=f"a product of at most {len(visible)}",
        )
    beyond = [index for index in vllm.gpus or () if visible and index >= len(visible)]
    if beyond:
        yield UserError(
            "no such GPU",
            where="vllm.gpus",
            value=beyond,
            expected=f"indices below {len(visible)}, the number of visible GPUs",
        )


def _count() -> int:
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_QUERY_SECONDS, check=False
        )
    except FileNotFoundError:  # containers may come without the tool
        return sum(_DEVICE.fullmatch(path.name) is not None for path in Path("/dev").glob("nvidia*"))
    except subprocess.TimeoutExpired:
        raise UserError(
            "nvidia-smi does not answer", where="nvidia-smi -L", hint="the driver hangs; it needs a person"
        ) from None
    if listing.returncode != 0:
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
