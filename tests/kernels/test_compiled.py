"""The kernels compile for GPUs, and fit into them, on a machine that has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import INTERPRETED

SHARED_MEMORY = {90: 227 * 1024, 89: 99 * 1024}
"""Bytes a block may use: Hopper, Ada."""


@INTERPRETED
def test_kernels_compile_and_fit(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    assert "TRITON_INTERPRET" not in environment, "what tests start must not run in the interpreter"
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_kernels"],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout.splitlines()[-1])
    assert len(made) == 6
    for kernel in made:
        assert kernel["bytes"] > 1000
        assert kernel["shared"] <= SHARED_MEMORY[kernel["capability"]], kernel
    # Half precision runs on the tensor cores; sums in float64 do not.
    assert [kernel["tensor_cores"] for kernel in made] == [True] * 5 + [False]


def test_the_tile_follows_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that a GPU's shared memory cannot hold would fail at launch."""
    import torch

    from ebft_core.kernels import selective_logprob_triton as kernels

    class Hidden:
        is_cuda, dtype, shape, device = True, torch.bfloat16, (4096, 2048), torch.device("cuda")

    widths = {}
    for capability in ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device, found=capability: found)
        tile = kernels.tile_for(Hidden())
        widths[capability] = (tile.x + tile.v) * tile.h * 2 * tile.stages  # bytes of operands in flight
    limit = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
    assert all(used <= limit[capability] * 1024 for capability, used in widths.items()), widths
    assert widths[9, 0] > widths[8, 9]
