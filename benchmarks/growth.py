"""How time and memory grow with the length of the rows (small model, product only).

The exponent is the slope of log(seconds of a step) over log(generated tokens): 1 means that a token
costs the same in a short row and in a long one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.memory import high_water_mb
from benchmarks.models import llama_3m
from benchmarks.setting import paper_setting
from ebft_core.bench.measure import median, random_batch, shape_of, timed_step
from ebft_core.models import freeze_copy

LENGTHS = (256, 512, 1024, 2048, 4096)


def measure(_lengths: list[int], say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds, memory growth and fitted exponents over `LENGTHS`."""
    rows = []
    for length in LENGTHS:
        say(f"growth: L = {length}")
        command = [sys.executable, "-m", "benchmarks.growth", str(length)]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1]
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    tokens = np.log([row["generated_tokens"] for row in rows])
    return {
        "rows": rows,
        "time_exponent": float(np.polyfit(tokens, np.log([row["seconds"] for row in rows]), 1)[0]),
        "memory_exponent": float(
            np.polyfit(
                np.log([row["packed_tokens"] for row in rows]), np.log([row["step_mb"] for row in rows]), 1
            )[0]
        ),
    }


def main() -> None:
    """Steps at one length in a process of its own; prints JSON."""
    length = int(sys.argv[1])
    config, policy = paper_setting(), llama_3m()
    frozen = freeze_copy(policy, torch.float32, torch.device("cpu"))
    batch = random_batch(length, 1, policy.config.vocab_size, config)
    shape = shape_of(batch, config)
    loaded = high_water_mb()
    rounds = 5 if length <= 1024 else 3
    times = [timed_step(policy, frozen, batch, config, "sdpa") for _ in range(rounds + 1)][1:]
    row = {
        "length": length,
        "generated_tokens": shape.generated,
        "packed_tokens": shape.length + shape.generated,
        "seconds": median(times, "step"),
        "step_mb": high_water_mb() - loaded,
    }
    sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
