"""Checkpoints of scratch training: safetensors and JSON in a folder committed by its manifest."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ebft_core.manifests import commit_folder, read_meta, verify_folder

_SCHEMA = "ebft.scratch_checkpoint/1"
_FIELDS = ("step", "exp_avg", "exp_avg_sq")


def save_checkpoint(work: Path, step: int, model: nn.Module, optimizer: torch.optim.AdamW) -> None:
    """Write weights and optimiser state after `step` steps, then remove older checkpoints."""
    staging = work / ".staging"
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    save_file(_weights(model), staging / "model.safetensors")
    save_file(_moments(model, optimizer), staging / "optimizer.safetensors")
    target = work / f"step-{step:08d}"
    commit_folder(staging, target, schema=_SCHEMA, meta={"step": step})
    for older in work.glob("step-*"):
        if older != target:
            shutil.rmtree(older)


def load_checkpoint(work: Path, model: nn.Module, optimizer: torch.optim.AdamW) -> int:
    """Restore the newest checkpoint that verifies and return its step; 0 if there is none."""
    for folder in sorted(work.glob("step-*"), reverse=True):
        if verify_folder(folder) is not None:
            model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
            _restore_moments(model, optimizer, load_file(folder / "optimizer.safetensors"))
            return int(read_meta(folder)["step"])
    return 0


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name; `named_parameters` gives a tied weight once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _moments(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    return {
        f"{name}.{field}": optimizer.state[parameter][field]
        for name, parameter in model.named_parameters()
        for field in _FIELDS
    }


def _restore_moments(model: nn.Module, optimizer: torch.optim.AdamW, tensors: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {field: tensors[f"{name}.{field}"] for field in _FIELDS}
