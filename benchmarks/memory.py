"""Peak memory of one step, each contender in a process of its own.

What is compared is the growth of the resident peak over the loaded model: weights and libraries are
the same for both.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.full_recompute import timed_plain_step
from benchmarks.models import llama_28m
from benchmarks.setting import paper_setting
from ebft_core.bench.measure import random_batch, timed_step
from ebft_core.models import freeze_copy


def measure(lengths: list[int], say: Callable[[str], None]) -> dict[str, Any]:
    """Peaks in MB, and the baseline's peak over the product's, by length."""
    result: dict[str, Any] = {"peak_mb": {}, "ratio": {}}
    for length in lengths:
        say(f"peak memory at L = {length}")
        peaks = {who: _in_a_child(who, length) for who in ("product", "baseline")}
        result["peak_mb"][f"L{length}"] = peaks
        result["ratio"][f"L{length}"] = peaks["baseline"]["total"] / peaks["product"]["total"]
    return result


def _in_a_child(who: str, length: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.memory", who, str(length)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    return json.loads(done.stdout.splitlines()[-1])


def high_water_mb() -> float:
    """Peak resident size of this process (VmHWM; a forked parent's peak is not inherited)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise OSError("no VmHWM in /proc/self/status")


def main() -> None:
    """One step of one contender; prints its peaks as JSON."""
    who, length = sys.argv[1], int(sys.argv[2])
    config, policy = paper_setting(), llama_28m()
    frozen = freeze_copy(policy, torch.float32, torch.device("cpu"))
    batch = random_batch(length, 1, policy.config.vocab_size, config)
    loaded = high_water_mb()
    if who == "product":
        timed_step(policy, frozen, batch, config, "sdpa")
    else:
        timed_plain_step(policy, frozen, batch, config)
    total = high_water_mb()
    sys.stdout.write(json.dumps({"loaded": loaded, "total": total}) + "\n")


if __name__ == "__main__":
    main()
