"""Everything that needs a GPU, in one call; writes `benchmarks/baselines/h200.json`.

    python -m benchmarks.gpu

On a fresh machine with a CUDA driver, from the repository's root:

    python3 -m venv .venv && .venv/bin/pip install -e '.[dev]' && .venv/bin/python -m benchmarks.gpu

Where no package index can be reached, an image's own torch, triton and transformers will do; what is missing
beside them is named before anything runs.

Parts, in this order: `tests` (kernels and everything else marked `gpu`), `oracles` (FlexAttention forward
and backward against plain forwards, block by block), `attention` (FlexAttention against SDPA on long rows),
`kernels`, `peak`, `phases`, `steps`, `growth`. On CUDA each runs in a process of its own, so an illegal
memory access costs one part and not the rest. A part that fails is recorded with its message; the file is
written after every part. `--minutes` bounds the whole, and what no longer fits is recorded as not run;
`--into` adds parts to a file that is there.

    python -m benchmarks.gpu --device cpu --tiny --output /tmp/tiny.json

walks the whole path with tiny shapes and means nothing else.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "benchmarks" / "baselines" / "h200.json"
NEEDED = (
    "triton",
    "transformers",
    "peft",
    "pydantic",
    "yaml",
    "pytest",
    "pytest_timeout",
    "hypothesis",
    "pyarrow",
)
TAIL = 3000
"""Characters of a failing child's output that are kept."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """How to run: where, how large, how long."""

    device: str
    tiny: bool
    deadline: float

    @property
    def seconds_left(self) -> float:
        """Until the whole must be done."""
        return self.deadline - time.monotonic()


def _pytest(files: list[str], options: Options) -> dict[str, Any]:
    """Run test files: the `gpu` ones on CUDA; on a CPU one quick test, for the path."""
    chosen = ["-m", "gpu"] if options.device == "cuda" else ["-k", "refusals", "-m", "not gpu"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, *files]
    limit = max(options.seconds_left, 1)
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=limit)
    summary = (done.stdout.strip().splitlines() or ["no output"])[-1]
    if done.returncode != 0:
        raise AssertionError(f"pytest: {summary}\n{done.stdout[-TAIL:]}{done.stderr[-TAIL:]}")
    return {"summary": summary, "files": files}


def _marked_files(under: str) -> list[str]:
    """Test files with a `gpu` mark: importing the others may need packages that the machine lacks."""
    files = sorted((ROOT / under).rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if "mark.gpu" in path.read_text(encoding="utf-8")]


def tests(options: Options, say: Say) -> dict[str, Any]:
    """Kernels, and every other test marked `gpu` outside of the oracles."""
    say("tests marked gpu")
    if options.tiny:
        return _pytest(["tests/kernels/test_group_gram.py"], options)
    others = [path for path in _marked_files("tests") if "/oracles/" not in path and "/kernels/" not in path]
    return _pytest(["tests/kernels", *others], options)


def oracles(options: Options, say: Say) -> dict[str, Any]:
    """FlexAttention's packed forward and backward, and what else of the oracles needs CUDA."""
    say("oracles on CUDA")
    if options.tiny:
        return _pytest(["tests/kernels/test_selective_logprob.py"], options)
    return _pytest(_marked_files("tests/oracles"), options)


def kernels(options: Options, say: Say) -> dict[str, Any]:
    """Reference, kernel and other libraries."""
    from benchmarks import kernels as benchmark

    say("kernels")
    return benchmark.measure(torch.device(options.device), benchmark.TINY if options.tiny else None)


def _suite(name: str) -> Callable[[Options, Say], dict[str, Any]]:
    def part(options: Options, say: Say) -> dict[str, Any]:
        from benchmarks import gpu_suite

        place = gpu_suite.Place(torch.device(options.device), options.tiny)
        return getattr(gpu_suite, name)(place, say)

    return part


PARTS: dict[str, Callable[[Options, Say], dict[str, Any]]] = {
    "tests": tests,
    "oracles": oracles,
    "attention": _suite("attention"),
    "kernels": kernels,
    "peak": _suite("peak"),
    "phases": _suite("phases"),
    "steps": _suite("steps"),
    "growth": _suite("growth"),
}


def run_part(name: str, options: Options, say: Say) -> dict[str, Any]:
    """A part's figures, or its failure: recorded, so that the other parts still run."""
    if options.seconds_left < 5:
        return {"failed": "not run: no time left", "seconds": 0.0}
    start = time.monotonic()
    try:
        # In-process on a CPU: there is no device state that a failure could poison.
        found = PARTS[name](options, say) if options.device == "cpu" else run_isolated(name, options)
    except Exception as error:  # noqa: BLE001 (whatever a part dies of must not stop the others)
        found = {"failed": f"{type(error).__name__}: {error}"[-TAIL:]}
    return {**found, "seconds": time.monotonic() - start}


def run_isolated(name: str, options: Options) -> dict[str, Any]:
    """Run one part in a child process and read what it found."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "part.json"
        command = [sys.executable, "-m", "benchmarks.gpu", "--only", name, "--output", str(output)]
        command += ["--device", options.device, "--minutes", str(options.seconds_left / 60)]
        command += ["--tiny"] if options.tiny else []
        limit = max(options.seconds_left, 1)
        done = subprocess.run(
            command, check=False, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=limit
        )
        if done.returncode != 0 or not output.exists():
            raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-TAIL:]}")
        return json.loads(output.read_text(encoding="utf-8"))


def headline(parts: dict[str, Any]) -> dict[str, Any]:
    """The few numbers that the goals name: the baseline over the product, shares of the peak, growth.

    Ratios are those of full fine-tuning; shares those of the setting with the most generated tokens a second.
    """
    found: dict[str, Any] = {"ratios": {}, "fraction_of_peak": {}}
    for length, measured in parts.get("steps", {}).get("full", {}).items():
        found["ratios"][f"rollout_{length}"] = measured["ratio"]["rollout"]["median"]
        found["ratios"][f"step_{length}"] = measured["ratio"]["step"]["median"]
        found["ratios"][f"memory_{length}"] = measured["memory_ratio"]
    rows = [row for row in parts.get("phases", {}).get("rows", []) if "error" not in row]
    if rows:
        best = max(rows, key=lambda row: row["tokens_per_second"]["step"])
        found["fraction_of_peak"] = best["fraction_of_peak"]
        found["fraction_of_peak_setting"] = {
            key: best[key] for key in ("mode", "attention", "rows", "length")
        }
    if "time_exponent" in parts.get("growth", {}):
        found["growth_exponent"] = parts["growth"]["time_exponent"]
    return found


def write_report(path: Path, parts: dict[str, Any]) -> None:
    """The file, in the schema of the other baselines, with `failures` beside the figures."""
    from benchmarks.machine import describe_gpu, describe_hardware, describe_versions

    hardware: dict[str, Any] = dict(describe_hardware())
    if torch.cuda.is_available():
        hardware["gpu_details"] = describe_gpu()
    failures = {name: part["failed"] for name, part in parts.items() if "failed" in part}
    report = {
        "hardware": hardware,
        "versions": describe_versions(),
        **headline(parts),
        "failures": failures,
        "parts": parts,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated: " + ", ".join(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: tests the path, measures nothing")
    parser.add_argument("--minutes", type=float, default=30.0, help="for all parts together")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="JSON file to write")
    parser.add_argument("--into", action="store_true", help="keep the parts that the output file already has")
    parser.add_argument("--only", choices=tuple(PARTS), help=argparse.SUPPRESS)
    return parser.parse_args()


def _missing(device: str) -> list[str]:
    needed = NEEDED if device == "cuda" else NEEDED[1:]
    return [name for name in needed if importlib.util.find_spec(name) is None]


def main() -> None:
    """Run the parts and write the file; exit code 1 if one failed, 2 if nothing can run here."""
    arguments = _arguments()
    console = Console(stderr=True)
    options = Options(arguments.device, arguments.tiny, time.monotonic() + 60 * arguments.minutes)
    if arguments.only:
        found = PARTS[arguments.only](options, console.print)
        arguments.output.write_text(json.dumps(found), encoding="utf-8")
        return
    missing = _missing(options.device)
    if missing or (options.device == "cuda" and not torch.cuda.is_available()):
        console.print(f"nothing can run: {'install ' + ', '.join(missing) if missing else 'no CUDA device'}")
        raise SystemExit(2)
    parts: dict[str, Any] = {}
    if arguments.into and arguments.output.exists():
        parts = json.loads(arguments.output.read_text(encoding="utf-8"))["parts"]
    chosen = arguments.parts.split(",")
    for name in chosen:
        parts[name] = run_part(name, options, console.print)
        state = parts[name].get("failed", "done").splitlines()[0]
        console.print(f"{name}: {state} ({parts[name]['seconds']:.0f} s)", highlight=False, markup=False)
        write_report(arguments.output, parts)
    if any("failed" in parts[name] for name in chosen):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
