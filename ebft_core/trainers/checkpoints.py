"""Checkpoints that are whole or absent, and hold no pickle.

A checkpoint is a folder with the trained parameters, the optimiser's tensors, the random number states
(safetensors) and the optimiser's, scheduler's and trainer's numbers (JSON). It is written beside its
place and committed by manifest and rename, so a process killed at any moment leaves the previous
checkpoint intact. On resume the newest folder whose hashes verify wins.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ebft_core.manifests import commit_folder, verify_folder

SCHEMA = "ebft.checkpoint/1"
PREFIX = "checkpoint-"
WEIGHTS, AVERAGE, OPTIMIZER, RNG = "trainable", "average", "optimizer", "rng"
_STAGING = ".staging-"


def checkpoint_step(folder: Path) -> int:
    """Optimiser step of a checkpoint folder, from its name."""
    return int(folder.name.removeprefix(PREFIX))


def newest_checkpoint(root: Path) -> Path | None:
    """The latest checkpoint below `root` that verifies; leftovers of killed writers are removed."""
    if not root.is_dir():
        return None
    for leftover in root.glob(f"{_STAGING}*"):
        shutil.rmtree(leftover)
    for folder in sorted(root.glob(f"{PREFIX}*"), key=checkpoint_step, reverse=True):
        if verify_folder(folder) is not None:
            return folder
    return None


def has_checkpoint(root: Path, step: int) -> bool:
    """Whether a checkpoint of `step` was committed."""
    return (root / f"{PREFIX}{step}").is_dir()


def open_staging(root: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of `step` into."""
    staging = root / f"{_STAGING}{step}"
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    return staging


def commit_checkpoint(staging: Path, root: Path, step: int, keep: int) -> Path:
    """Commit a staged checkpoint and remove all but the newest `keep`."""
    target = root / f"{PREFIX}{step}"
    commit_folder(staging, target, schema=SCHEMA, meta={"global_step": step})
    for old in sorted(root.glob(f"{PREFIX}*"), key=checkpoint_step, reverse=True)[keep:]:
        shutil.rmtree(old)
    return target


def save_tensors(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Write `name.safetensors`."""
    save_file(
        {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()},
        _file(folder, name),
    )


def load_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """Read `name.safetensors`."""
    return load_file(_file(folder, name))


def save_optimizer(folder: Path, state: Mapping[str, Any]) -> None:
    """Write an optimiser's `state_dict`: tensors to safetensors, everything else to JSON."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, entry in state["state"].items():
        for key, value in entry.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value
            else:
                numbers[f"{index}.{key}"] = value
    save_tensors(folder, OPTIMIZER, tensors)
    write_json(folder, OPTIMIZER, {"param_groups": state["param_groups"], "numbers": numbers})


def load_optimizer(folder: Path) -> dict[str, Any]:
    """The inverse of `save_optimizer`."""
    saved = read_json(folder, OPTIMIZER)
    entries: dict[int, dict[str, Any]] = {}
    for name, value in {**load_tensors(folder, OPTIMIZER), **saved["numbers"]}.items():
        index, key = name.split(".", 1)
        entries.setdefault(int(index), {})[key] = value
    return {"state": entries, "param_groups": saved["param_groups"]}


def save_rng(folder: Path) -> None:
    """Write the states of torch's random number generators (CPU and every GPU)."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    save_tensors(folder, RNG, states)


def load_rng(folder: Path) -> None:
    """Restore the states that `save_rng` wrote."""
    states = load_tensors(folder, RNG)
    torch.set_rng_state(states.pop("cpu"))
    for name, state in states.items():
        torch.cuda.set_rng_state(state, int(name.removeprefix("cuda.")))


def write_json(folder: Path, name: str, value: object) -> None:
    """Write `name.json`."""
    (folder / f"{name}.json").write_text(json.dumps(value, indent=1), encoding="utf-8")


def read_json(folder: Path, name: str) -> Any:
    """Read `name.json`."""
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def _file(folder: Path, name: str) -> str:
    return str(folder / f"{name}.safetensors")
