"""The machine: packages, accelerator, memory, and the folder of the run."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

from ebft_core.config import RunConfig, TrainerConfig
from ebft_core.doctor.check import Check, guarded
from ebft_core.preflight import check_preflight, check_workspace
from ebft_core.runs import plan_run
from ebft_core.tested_versions import TESTED, installed_dependencies

_GB = 1e9


def check_versions() -> list[Check]:
    """One line per problem, and one that sums up the rest."""
    found = installed_dependencies()
    checks = []
    for one in found:
        if one.fit == "missing":
            checks.append(
                Check(one.name, "fail", f"not installed; wanted {one.wanted or 'any'}", "make setup")
            )
        elif one.fit == "refused":
            detail = f"{one.version} is outside {one.wanted}"
            checks.append(Check(one.name, "fail", detail, "make setup"))
        elif one.fit == "untested":
            detail = f"{one.version}; tested with {TESTED[one.name]}"
            checks.append(Check(one.name, "warn", detail, "pip install -c constraints.txt installs those"))
    tested = [f"{one.name} {one.version}" for one in found if one.fit == "tested" and one.name in TESTED]
    return [*checks, Check("versions", "ok", f"as tested: {', '.join(tested) or 'none'}")]


def check_device(trainer: TrainerConfig) -> list[Check]:
    """Accelerators and memory, and what training would use of them."""
    import torch

    from ebft_core.models import select_attention, select_device, select_precision

    def choice() -> Check:
        device = select_device(trainer)
        attention = select_attention(trainer, device)
        precision = str(select_precision(trainer, device)).removeprefix("torch.")
        return Check("training", "ok", f"device {device.type}, attention {attention}, precision {precision}")

    memory = psutil.virtual_memory()
    threads = torch.get_num_threads()
    checks = [
        Check(
            "memory",
            "ok",
            f"{memory.available / _GB:.1f} of {memory.total / _GB:.1f} GB free, {threads} threads",
        )
    ]
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        checks.append(Check(f"GPU {index}", "ok", f"{name}, {free / _GB:.1f} of {total / _GB:.1f} GB free"))
    if not torch.cuda.is_available():
        checks.append(_no_gpu())
    return [*checks, guarded("training", choice)]


def check_folder(workspace: Path) -> Check:
    """Files can be made in the workspace."""

    def look() -> Check:
        check_workspace(workspace)
        free = shutil.disk_usage(workspace).free
        return Check("workspace", "ok", f"{workspace} can be written, {free / _GB:.1f} GB free")

    return guarded("workspace", look)


def check_data_and_disk(config: RunConfig) -> Check:
    """The sources are there, the stages still to do have room, and an archive can be written."""

    def look() -> Check:
        plan = plan_run(config)
        check_preflight(config, plan)
        done = sum(stage.state == "done" for stage in plan.stages)
        archive = "" if config.archive is None else ", the archive can be written"
        state = f"{done} of {len(plan.stages)} stages done"
        detail = f"sources found, disk suffices{archive}, {state}"
        return Check("data and disk", "ok", detail)

    return guarded("data and disk", look)


def _no_gpu() -> Check:
    import torch

    from ebft_core.vllm.gpus import visible_gpus

    if visible_gpus() and torch.version.cuda is None:
        detail = f"there is one, but torch {torch.__version__} is a build without CUDA"
        return Check("GPU", "warn", detail, "install a CUDA build of torch")
    return Check("GPU", "ok", "none: everything runs on the CPU")
