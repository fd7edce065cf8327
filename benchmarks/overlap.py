"""How well generation and training overlap: wall time per step of the async schedule, beside the sync one.

    python -m benchmarks.overlap --output benchmarks/baselines/overlap-cpu-2core.json

A real vLLM server (`make setup-vllm`) and the trainer share one machine. On a CPU they would compete for the
same cores, so each gets one of its own: the server's processes are bound to one, this process, with one
thread, to another. At least two cores are needed, and nothing else should run.

Both schedules do equal work: the same rows, samples and lengths, in the same number of steps. They take turns
against one server. A step of the sync schedule is taken apart into generation (waiting for the server) and
training (everything else: weight sync, features, rewards, update). The goal: a step of the async schedule
takes at most 1.15 times the longer of the two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machine import describe_hardware, describe_versions
from ebft_core.base_model import BaseModelInfo, digest_model_folder, write_base
from ebft_core.config import FromScratchConfig, RunConfig, parse_config
from ebft_core.events import EventWriter, read_events
from ebft_core.manifests import commit_folder
from ebft_core.runs import plan_run, write_run_folder
from ebft_core.scratch.tokenizer import make_tokenizer
from ebft_core.stage_runner import run_stage
from ebft_core.stop import StopSignal
from ebft_core.vllm.keeper import Keeper
from ebft_core.vllm.spec import DEFAULT_PYTHON, make_spec
from ebft_core.vllm.state import server_folder, wait_ready

GOAL = 1.15
WARM_UP = 2
"""Steps of each turn that are not counted: the first one of the async schedule waits for its completions."""
START_SECONDS = 300.0
DEPTHS = {"sync": 0, "async": 1}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimiser step: all of it, and the part that waited for completions."""

    whole: float
    waited: float


def run_config(folder: Path, python: Path, depth: int, arguments: argparse.Namespace) -> RunConfig:
    """A structured run on random prompts; `depth` is all that differs between the schedules."""
    return parse_config(
        {
            "name": f"overlap-{depth}",
            "workspace": str(folder / "workspace"),
            "model": {"name_or_path": str(folder / "model")},
            "data": {
                "sources": [{"path": str(folder / "pairs.jsonl")}],
                "transform": "prompt_completion",
                "sequence_length": 64,
            },
            "ebft": {
                "mode": "structured",
                "n_samples_per_prompt": 4,
                "max_completion_length": arguments.completion_length,
                "adaptive_max_tokens": False,
                "temperature": 1.0,
            },
            "rollout": {"prefetch_depth": depth},
            "trainer": {
                "micro_batch_size": 2,
                "batch_size": arguments.prompts,
                "max_steps": WARM_UP + arguments.steps,
                "save_every": 10_000,
                "device": "cpu",
                "precision": "float32",
            },
            "lora": {"r": 16, "alpha": 32},
            "vllm": {
                "python": str(python),
                "dtype": "float32",
                "enforce_eager": True,
                "startup_timeout": START_SECONDS,
            },
        },
        origin="benchmark",
    )


def make_inputs(folder: Path) -> None:
    """A small random Llama with a byte tokenizer, and pairs of random letters."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512}
    ends = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 257}
    LlamaForCausalLM(LlamaConfig(vocab_size=258, **sizes, **ends)).save_pretrained(folder / "model")
    make_tokenizer(FromScratchConfig(sources=["stdlib:abc.py"]), []).save_pretrained(folder / "model")
    letters = torch.randint(97, 123, (256, 56), generator=torch.Generator().manual_seed(0)).tolist()
    pairs = [{"prompt": bytes(row[:24]).decode(), "completion": bytes(row[24:]).decode()} for row in letters]
    text = "".join(json.dumps(pair) + "\n" for pair in pairs)
    (folder / "pairs.jsonl").write_text(text, encoding="utf-8")


def bound_python(folder: Path, python: Path, core: int) -> Path:
    """An interpreter whose processes all run on one core."""
    script = folder / "python-on-one-core"
    settings = f"export OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND={core}"
    script.write_text(f'#!/bin/sh\n{settings}\nexec taskset -c {core} {shlex.quote(str(python))} "$@"\n')
    script.chmod(0o755)
    return script


@contextlib.contextmanager
def serving(config: RunConfig, model: Path, folder: Path) -> Iterator[Path]:
    """A kept server; the folder of its state."""
    stop = StopSignal()
    spec = make_spec(config, model, digest_model_folder(model))
    keeper = Keeper(spec, folder, events=EventWriter(None, "vllm"), stop=stop)
    thread = threading.Thread(target=keeper.run, name="keeper")
    thread.start()
    try:
        wait_ready(folder, timeout=START_SECONDS, give_up=lambda: not thread.is_alive())
        yield folder
    finally:
        stop.request("the benchmark is over")
        thread.join()


def train(config: RunConfig, model: Path, server: Path) -> list[StepTime]:
    """The counted steps of one run against the server."""
    plan = plan_run(config)
    write_run_folder(plan, config)
    base = plan.stage("prepare_base").output
    staging = base.with_name("staging")
    if not base.exists():
        staging.mkdir(parents=True)
        write_base(staging, BaseModelInfo(model, digest_model_folder(model), str(model)))
        commit_folder(staging, base, schema="ebft.prepare_base/1", meta={})
    server_folder(plan.run_dir).symlink_to(server, target_is_directory=True)
    run_stage("tokenize", plan.run_dir, events=EventWriter(None, "tokenize"), stop=StopSignal())
    journal = plan.run_dir / "events" / "train.jsonl"
    run_stage("train", plan.run_dir, events=EventWriter(journal, "train"), stop=StopSignal())
    found = [event["values"] for event in read_events(journal) if event["kind"] == "metrics"]
    return [StepTime(v["perf/step_seconds"], v["rollout/waited_seconds"]) for v in found[WARM_UP:]]


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All turns, and what they say."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("this benchmark needs two cores: one for the server, one for the trainer")
    os.sched_setaffinity(0, {cores[0]})
    torch.set_num_threads(1)
    turns: list[dict[str, list[StepTime]]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        python = bound_python(folder, arguments.python.absolute(), cores[1])
        model = folder / "model"
        console.print("starting the server")
        with serving(run_config(folder, python, 0, arguments), model, folder / "server") as server:
            for turn in range(arguments.turns):
                turns.append({})
                for schedule, depth in DEPTHS.items():
                    console.print(f"turn {turn + 1} of {arguments.turns}: {schedule}")
                    own = run_config(folder, python, depth, arguments)
                    own = own.model_copy(update={"workspace": str(folder / f"turn{turn}")})
                    turns[turn][schedule] = train(own, model, server)
    found = [{name: [asdict(t) for t in steps] for name, steps in turn.items()} for turn in turns]
    return {**summary(turns), "turns": found}


def summary(turns: Sequence[Mapping[str, Sequence[StepTime]]]) -> dict[str, float]:
    """Medians over the turns of the means over a turn's steps.

    Means: where generation is the slower one, steps that wait long and steps that do not wait take turns.
    """
    of_turns = [_of_turn(turn) for turn in turns]
    return {name: statistics.median(found[name] for found in of_turns) for name in of_turns[0]} | {
        "goal": GOAL
    }


def _of_turn(turn: Mapping[str, Sequence[StepTime]]) -> dict[str, float]:
    step = {name: statistics.fmean(t.whole for t in steps) for name, steps in turn.items()}
    generation = statistics.fmean(t.waited for t in turn["sync"])
    training = step["sync"] - generation
    return {
        "generation_seconds": generation,
        "training_seconds": training,
        "sync_step_seconds": step["sync"],
        "async_step_seconds": step["async"],
        "ratio": step["async"] / max(generation, training),
    }


def print_table(result: dict[str, Any], console: Console) -> None:
    """One row: what a step takes."""
    table = Table(title="overlap of generation and training, one core each", title_justify="left")
    names = ["generation_seconds", "training_seconds", "sync_step_seconds", "async_step_seconds"]
    for heading in ("generation", "training", "sync step", "async step", "async / longer", "goal", ""):
        table.add_column(heading, justify="right")
    reached = "met" if result["ratio"] <= GOAL else "missed"
    seconds = [f"{result[name]:.2f} s" for name in names]
    table.add_row(*seconds, f"{result['ratio']:.2f}", f"<= {GOAL}", reached)
    console.print(table)


def main() -> None:
    """Measure, print the table, write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", type=Path, default=DEFAULT_PYTHON, help="interpreter that has vLLM")
    parser.add_argument("--turns", type=int, default=3, help="turns of each schedule")
    parser.add_argument("--steps", type=int, default=8, help="counted steps of a turn")
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a step, four samples each")
    parser.add_argument("--completion-length", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    result = measure(arguments, Console(stderr=True))
    if arguments.output:
        report = {"hardware": describe_hardware(), "versions": describe_versions(), **result}
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print_table(result, Console())


if __name__ == "__main__":
    main()
