"""The strided step against the plain baseline, against the machine's peak, and against its own growth.

`make bench` runs it and writes `benchmarks/baselines/<machine>.json`; figures are never typed by hand.
Parts can be run alone: `python -m benchmarks.strided --parts steps,peak --lengths 256`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import growth, memory, overhead
from benchmarks.full_recompute import timed_plain_step
from benchmarks.machine import describe_hardware, describe_versions
from benchmarks.models import llama_28m
from benchmarks.report import print_report
from benchmarks.setting import paper_setting
from ebft_core.bench.cost_model import ModelCost, step_flops
from ebft_core.bench.measure import (
    PHASES,
    PhaseTimes,
    interleave,
    matrix_peak,
    median,
    median_ratio,
    random_batch,
    shape_of,
    timed_step,
)
from ebft_core.bench.suite import fractions
from ebft_core.models import freeze_copy

CPU = torch.device("cpu")
ROUNDS = {256: 5, 1024: 3}


def steps(lengths: list[int], say: Callable[[str], None]) -> dict[str, Any]:
    """Ratios of the baseline to the product, in turn on the same rows."""
    config = paper_setting()
    policy = llama_28m()
    frozen = freeze_copy(policy, torch.float32, CPU)
    result: dict[str, Any] = {}
    for length in lengths:
        say(f"one step at L = {length}: product and baseline in turn")
        batch = random_batch(length, 1, policy.config.vocab_size, config)
        times = interleave(
            {
                "product": lambda b=batch: timed_step(policy, frozen, b, config, "sdpa"),
                "baseline": lambda b=batch: timed_plain_step(policy, frozen, b, config),
            },
            rounds=ROUNDS.get(length, 3),
        )
        result[f"L{length}"] = {
            "seconds": {name: _summary(values) for name, values in times.items()},
            "ratio": {p: median_ratio(times["baseline"], times["product"], p) for p in (*PHASES, "step")},
        }
    return result


def peak(lengths: list[int], say: Callable[[str], None]) -> dict[str, Any]:
    """Share of the machine's matrix-product peak that each phase reaches (linear layers only)."""
    config = paper_setting()
    policy = llama_28m()
    frozen = freeze_copy(policy, torch.float32, CPU)
    result: dict[str, Any] = {}
    for length in lengths:
        say(f"share of the peak at L = {length}")
        batch = random_batch(length, 1, policy.config.vocab_size, config)
        flops = step_flops(ModelCost.of(policy), shape_of(batch, config), config.feature_layers)
        shares: list[dict[str, float]] = []
        timed_step(policy, frozen, batch, config, "sdpa")
        for _ in range(5):
            # The peak is measured beside each step: the machine's speed drifts.
            top = matrix_peak(CPU, torch.float32, rounds=3)
            times = timed_step(policy, frozen, batch, config, "sdpa")
            shares.append(fractions(flops, {p: median([times], p) for p in PHASES}, top))
        result[f"L{length}"] = {
            phase: {
                "median": sorted(s[phase] for s in shares)[len(shares) // 2],
                "min": min(s[phase] for s in shares),
                "max": max(s[phase] for s in shares),
            }
            for phase in PHASES
        }
    return result


def _summary(times: list[PhaseTimes]) -> dict[str, float]:
    return {phase: median(times, phase) for phase in (*PHASES, "step")}


def headline(parts: dict[str, Any]) -> dict[str, Any]:
    """The few numbers that the goals name, picked from the parts that were run."""
    found: dict[str, Any] = {"ratios": {}, "fraction_of_peak": {}}
    for length in (256, 1024):
        measured = parts.get("steps", {}).get(f"L{length}")
        if measured:
            found["ratios"][f"rollout_L{length}"] = measured["ratio"]["rollout"]["median"]
            found["ratios"][f"step_L{length}"] = measured["ratio"]["step"]["median"]
    for length, ratio in parts.get("memory", {}).get("ratio", {}).items():
        found["ratios"][f"memory_{length}"] = ratio
    shares = parts.get("peak", {})
    if shares:
        longest = shares[max(shares, key=lambda name: int(name[1:]))]
        found["fraction_of_peak"] = {phase: longest[phase]["median"] for phase in PHASES}
    if "growth" in parts:
        found["growth_exponent"] = parts["growth"]["time_exponent"]
    return found


PARTS: dict[str, Callable[[list[int], Callable[[str], None]], dict[str, Any]]] = {
    "steps": steps,
    "memory": memory.measure,
    "peak": peak,
    "growth": growth.measure,
    "overhead": overhead.measure,
}


def main() -> None:
    """Run the parts, print the table, write the baseline file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated: " + ", ".join(PARTS))
    parser.add_argument("--lengths", default="256,1024", help="row lengths of the step and peak parts")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    lengths = [int(length) for length in arguments.lengths.split(",")]
    measured: dict[str, Any] = {}
    for name in arguments.parts.split(","):
        measured[name] = PARTS[name](lengths, console.print)
        report = {
            "hardware": describe_hardware(),
            "versions": describe_versions(),
            **headline(measured),
            "parts": measured,
        }
        if arguments.output:  # after every part: a later one that fails must not cost the earlier ones
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print_report(report, Console())


if __name__ == "__main__":
    main()
