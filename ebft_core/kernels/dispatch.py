"""Kernel or reference: decided by the device, forced in tests and benchmarks."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Literal

import torch

KernelBackend = Literal["auto", "torch", "triton"]
"""`auto`: the kernel on CUDA where Triton is installed, else the torch reference."""

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernels compute in; other dtypes (float64 in oracles) take the reference."""


HALF_DTYPES = (torch.bfloat16, torch.float16)


@cache
def triton_installed() -> bool:
    """Whether Triton can be imported; it is not imported here."""
    return importlib.util.find_spec("triton") is not None


def use_kernel(
    backend: KernelBackend,
    device: torch.device,
    dtype: torch.dtype,
    pays: tuple[torch.dtype, ...] = KERNEL_DTYPES,
) -> bool:
    """Whether to run the Triton kernel.

    Args:
        backend: `triton` runs it whatever the device (on a CPU that needs Triton's interpreter).
        pays: dtypes for which `auto` takes the kernel.

    Raises:
        ValueError: `triton` was asked for with a dtype that the kernels do not know.
    """
    if backend == "torch":
        return False
    if backend == "triton":
        if dtype not in KERNEL_DTYPES:
            raise ValueError(f"the kernels compute in float32, bfloat16 or float16, got {dtype}")
        return True
    return device.type == "cuda" and dtype in pays and triton_installed()


def dot_needs_float32(dtype: torch.dtype) -> bool:
    """True in Triton's interpreter for bfloat16, whose bit patterns it would multiply as integers."""
    from triton import knobs

    return dtype == torch.bfloat16 and bool(knobs.runtime.interpret)
