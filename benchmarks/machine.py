"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "datasets", "peft")


def describe_hardware() -> dict[str, str | int | float]:
    """Processor, cores, memory, GPU."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return {
        "processor": found[1].strip() if found else platform.processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def describe_gpu() -> dict[str, str | int | float]:
    """Memory, multiprocessors, capability and driver side of the current GPU."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": str(torch.version.cuda),
    }


def describe_versions() -> dict[str, str]:
    """Python and the packages that do the work."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(name: str) -> str:
    """A package that a part does not need may be absent on the machine that measures it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
