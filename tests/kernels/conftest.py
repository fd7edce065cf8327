"""Kernel tests run in Triton's interpreter on a CPU, and compiled where there is a GPU."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles here; the interpreter is off"
)


@pytest.fixture(params=[pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the kernel runs."""
    return torch.device(request.param)
