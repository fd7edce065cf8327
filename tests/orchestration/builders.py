"""Small runs for the tests of the orchestration: a corpus of a few files and a two-layer model."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import yaml

from ebft_core.config import RunConfig, parse_config
from ebft_core.runs import RunPlan, plan_run, write_run_folder

PROGRAM = Path(__file__).with_name("fake_program.py")
_WORDS = ["def", "return", "import", "class", "self", "x", "=", "1", "(", ")", "os", "sys", "for", "in"]


def write_corpus(folder: Path, documents: int = 24) -> str:
    """Text files of random words; returns the glob that matches them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        words = random.Random(number).choices(_WORDS, k=90)
        (folder / f"d{number:02d}.txt").write_text(" ".join(words), encoding="utf-8")
    return str(folder / "*.txt")


def micro_document(folder: Path, **trainer: Any) -> dict[str, Any]:
    """The content of a run file whose whole pipeline takes seconds."""
    text = write_corpus(folder / "text")
    base = {"sources": [text], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    base |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_steps": 6, "batch_size": 4}
    return {
        "name": "micro",
        "workspace": str(folder / "workspace"),
        "model": {"from_scratch": {**base, "sequence_length": 64}},
        "data": {"sources": [{"path": text}], "sequence_length": 64, "heldout_fraction": 0.2},
        "ebft": {"temperature": 1.0, "feature_layers": [0.5, 1.0], "whitening": "none", "ce_coef": 0.5},
        "lora": {"r": 4, "alpha": 8.0},
        "trainer": {
            "learning_rate": 1e-3, "max_steps": 4, "micro_batch_size": 2, "save_every": 2, "device": "cpu",
            **trainer,
        },
        "evaluate": {"max_rows": 4, "bootstrap_samples": 50, "sample_rollouts": 2},
        "storage": {"reserve_gb": 0.05},
    }  # fmt: skip


def micro_config(folder: Path, **trainer: Any) -> RunConfig:
    """`micro_document`, checked."""
    return parse_config(micro_document(folder, **trainer))


def micro_file(folder: Path, **trainer: Any) -> Path:
    """`micro_document` as a run file."""
    path = folder / "micro.yaml"
    path.write_text(yaml.safe_dump(micro_document(folder, **trainer)), encoding="utf-8")
    return path


def planned_run(folder: Path) -> RunPlan:
    """A run that is planned and has its folder."""
    config = micro_config(folder)
    plan = plan_run(config)
    write_run_folder(plan, config)
    return plan


def fake_command(stage: str, run_dir: Path, behaviour: str) -> list[str]:
    """The command line of a stage program that runs one of `fake_stages`."""
    return [sys.executable, str(PROGRAM), stage, str(run_dir), behaviour]
