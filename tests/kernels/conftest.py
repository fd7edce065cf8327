"""Kernel tests run in Triton's interpreter on a CPU, and compiled where there is a GPU."""

from __future__ import annotations

import pytest
import torch
from triton import knobs

INTERPRETED = pytest.mark.skipif(
    not knobs.runtime.interpret, reason="Triton compiles here; its interpreter is off"
)


@pytest.fixture(params=[pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the kernel runs."""
    return torch.device(request.param)
