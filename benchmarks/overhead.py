"""What the pipeline adds to the arithmetic: the event stream, tokenization, merging.

Each figure is a ratio of two things done in turn on the same data.
"""

from __future__ import annotations

import shutil
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from benchmarks.models import llama_28m
from benchmarks.setting import paper_setting
from ebft_core.bench.measure import median, random_batch, timed_step
from ebft_core.config import parse_config
from ebft_core.data.pipeline import DataPipeline
from ebft_core.events import EventWriter
from ebft_core.lora_merge import merge_adapter
from ebft_core.manifests import sha256_file
from ebft_core.models import freeze_copy
from ebft_core.stop import StopSignal
from ebft_core.trainers.metrics import StepSums

ROUNDS = 5
MERGES = 9
EVENTS = 500


def measure(_lengths: list[int], say: Callable[[str], None]) -> dict[str, Any]:
    """The three ratios with their goals."""
    with tempfile.TemporaryDirectory() as folder:
        say("overhead: event stream")
        events = event_share(Path(folder))
        say("overhead: tokenization")
        tokenizing = tokenize_ratio(Path(folder))
        say("overhead: merge")
        merging = merge_ratio(Path(folder))
    return {
        "events and metrics, share of a step": _entry(events, f"{events:.3%}", "<= 1%", events <= 0.01),
        "tokenization, share of the bare encoder": _entry(
            tokenizing, f"{tokenizing:.0%}", ">= 80%", tokenizing >= 0.8
        ),
        "merge, times copy with hashing": _entry(merging, f"{merging:.2f}x", "<= 1.5x", merging <= 1.5),
    }


def _entry(value: float, text: str, goal: str, met: bool) -> dict[str, Any]:
    return {"value": value, "text": text, "goal": goal, "reached": "met" if met else "missed"}


def event_share(folder: Path) -> float:
    """Time to sum, format and append the metrics of a step, over the time of a step at L = 256."""
    config, policy = paper_setting(), llama_28m()
    frozen = freeze_copy(policy, torch.float32, torch.device("cpu"))
    batch = random_batch(256, 1, policy.config.vocab_size, config)
    step = median([timed_step(policy, frozen, batch, config, "sdpa") for _ in range(ROUNDS + 1)][1:], "step")
    writer = EventWriter(folder / "events.jsonl", "train")
    started = time.perf_counter()
    for number in range(EVENTS):
        writer.metrics(number, StepSums().metrics(), total=EVENTS)
    return (time.perf_counter() - started) / EVENTS / step


def tokenize_ratio(folder: Path) -> float:
    """Speed of the tokenize stage's work over that of the tokenizer's bare batch encoder on the same text."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_text(encoding="utf-8") for path in sorted(root.glob("*.py"))]
    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(texts, vocab_size=4096, special_tokens=["<|endoftext|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend._tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    config = parse_config(
        {
            "model": {"name_or_path": "unused"},
            "data": {"sources": [{"path": "stdlib:*.py"}], "bad_rows": "quarantine", "max_bad_fraction": 1.0},
        },
        origin="benchmark",
    )
    ratios = []
    for number in range(ROUNDS + 1):
        started = time.perf_counter()
        backend._tokenizer.encode_batch(texts)
        bare = time.perf_counter() - started
        output, work = folder / f"rows{number}", folder / f"work{number}"
        output.mkdir()
        work.mkdir()
        started = time.perf_counter()
        events = EventWriter(None, "tokenize")
        DataPipeline(config, tokenizer, len(tokenizer), events=events, stop=StopSignal()).write(output, work)
        ratios.append(bare / (time.perf_counter() - started))
    return statistics.median(ratios[1:])


def merge_ratio(folder: Path) -> float:
    """Time to merge an adapter into a base, over the time to copy the base's files and hash the copies."""
    base, adapter = folder / "base", folder / "adapter"
    model = llama_28m()
    model.save_pretrained(base)
    get_peft_model(
        model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    ).save_pretrained(adapter)
    target = folder / "written"

    def copy() -> None:
        shutil.copytree(base, target)
        for path in target.iterdir():
            sha256_file(path)

    def merge() -> None:
        merge_adapter(base, adapter, target)

    seconds: dict[str, list[float]] = {"copy": [], "merge": []}
    for _ in range(MERGES + 1):
        for name, work in (("copy", copy), ("merge", merge)):
            started = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - started)
            shutil.rmtree(target)  # or one of the two would write into memory the system has not touched yet
    return statistics.median(seconds["merge"][1:]) / statistics.median(seconds["copy"][1:])
