"""The GPU script, walked on a CPU with tiny shapes: every part, a part that dies, a machine without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.kernels import main as kernels_main

ROOT = Path(__file__).parents[1]
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


def _options(**changes: Any) -> gpu.Options:
    return gpu.Options(**({"device": "cpu", "tiny": True, "deadline": time.monotonic() + 300} | changes))


@pytest.mark.slow
def test_every_part_in_one_call(tmp_path: Path) -> None:
    """The file has the schema of the other baselines, and its figures hang together."""
    path = tmp_path / "tiny.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny", "--output", str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["failures"] == {}
    assert list(report["parts"]) == list(gpu.PARTS)
    shipped = json.loads((ROOT / "benchmarks/baselines/cpu-2core.json").read_text())
    assert set(shipped) <= set(report)
    assert set(report["ratios"]) == {"rollout_L24", "step_L24", "memory_L24"}
    assert set(report["fraction_of_peak"]) == {"rollout", "features", "update"}
    parts = report["parts"]
    assert "1 passed" in parts["tests"]["summary"]
    assert parts["attention"]["logprob_difference"] < 1e-4
    seconds = parts["steps"]["full"]["L24"]["seconds"]
    assert report["ratios"]["step_L24"] == pytest.approx(
        seconds["baseline"]["step"] / seconds["product"]["step"]
    )
    first, second = parts["growth"]["rows"]
    assert second["generated_tokens"] > first["generated_tokens"]


def test_a_part_that_fails_is_recorded_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(_options: gpu.Options, _say: gpu.Say) -> dict[str, Any]:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setitem(gpu.PARTS, "kernels", dies)
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"parts": {"growth": {"time_exponent": 1.1, "seconds": 2.0}}}))
    arguments = [
        "gpu",
        "--device",
        "cpu",
        "--tiny",
        "--parts",
        "kernels,peak",
        "--into",
        "--output",
        str(path),
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as stopped:
        gpu.main()
    assert stopped.value.code == 1
    report = json.loads(path.read_text())
    assert report["failures"] == {"kernels": "RuntimeError: an illegal memory access was encountered"}
    assert report["parts"]["peak"]["flops"] > 1e6
    assert report["growth_exponent"] == 1.1, "parts of an earlier call stay"


def test_a_part_in_a_process_of_its_own() -> None:
    assert gpu.run_isolated("peak", _options())["flops"] > 1e6


@WITHOUT_GPU
def test_a_dying_child_leaves_its_last_words() -> None:
    found = gpu.run_part("peak", _options(device="cuda"), print)
    assert "exit code 1" in found["failed"]
    assert "CUDA" in found["failed"]


def test_what_no_longer_fits_is_not_run() -> None:
    found = gpu.run_part("peak", _options(deadline=time.monotonic() + 1), print)
    assert found["failed"] == "not run: no time left"


@WITHOUT_GPU
def test_without_a_gpu_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--output", str(tmp_path / "h200.json")])
    with pytest.raises(SystemExit) as stopped:
        gpu.main()
    assert stopped.value.code == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@WITHOUT_GPU
def test_the_kernel_benchmark_says_that_it_needs_a_gpu(capsys) -> None:
    kernels_main()
    captured = capsys.readouterr()
    assert "no CUDA device here, nothing measured" in captured.err
    assert captured.out == ""
