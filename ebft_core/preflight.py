"""What is checked before anything runs: workspace and archive can be written, there is room, and the tasks of
the evaluation can be done.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ebft_core.config import RunConfig
from ebft_core.errors import UserError
from ebft_core.evaluation.downstream.check import check_tasks
from ebft_core.runs import RunPlan
from ebft_core.storage.archive import open_archive

_GB = 1e9
_ADAM_BYTES = 8  # two float32 moments per trained weight


@dataclass(frozen=True)
class ModelSize:
    """Rough size of the base model: weights in number and bytes, and the dimensions LoRA needs."""

    parameters: int
    weight_bytes: int
    hidden: int
    intermediate: int
    layers: int


def check_preflight(config: RunConfig, plan: RunPlan) -> None:
    """Check workspace, tasks, disk and archive. Raises UserError; leaves nothing in the workspace."""
    check_workspace(plan.workspace)
    check_tasks(config)
    check_disk(config, plan)
    archive = open_archive(config, plan)
    if archive is not None:
        archive.store.check(archive.where, write=True)


def check_workspace(workspace: Path) -> None:
    """Raise UserError unless files can be made in `workspace` (created if absent)."""
    try:
        workspace.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=workspace) as stream:
            stream.write(b"0")
    except OSError as error:
        raise UserError(
            "the workspace is not writable",
            where="workspace",
            value=str(workspace),
            expected="a folder in which files can be made",
            hint=f"{error.strerror or error}; choose another with --set workspace=…",
        ) from error


def check_disk(config: RunConfig, plan: RunPlan) -> None:
    """Raise UserError if the stages that are still to do would leave less than `storage.reserve_gb` free."""
    need = estimate_bytes(config, plan)
    free = shutil.disk_usage(plan.workspace).free
    reserve = int(config.storage.reserve_gb * _GB)
    if free < need + reserve:
        raise UserError(
            "the disk is too small for this run",
            where=f"workspace ({plan.workspace})",
            value=f"{free / _GB:.1f} GB free",
            expected=f"{need / _GB:.1f} GB for the run + {reserve / _GB:.1f} GB reserve (storage.reserve_gb)",
            hint="make room, choose another workspace, or lower trainer.keep_checkpoints",
        )


def estimate_bytes(config: RunConfig, plan: RunPlan) -> int:
    """Bytes that the stages still to do will write: base model, checkpoints, tuned and merged model.

    A hub model that is not here yet counts as nothing: its size is not known without the network.
    """
    size = model_size(config)
    if size is None:
        return 0
    if config.lora is None:
        trained, result = size.parameters, size.weight_bytes
    else:
        per_layer = 4 * (2 * size.hidden) + 3 * (size.hidden + size.intermediate)
        trained = config.lora.r * per_layer * size.layers
        result = 4 * trained
    averages = 4 * trained if config.ebft.ema_decay > 0 else 0
    checkpoint = (4 + _ADAM_BYTES) * trained + averages
    needs = {
        "prepare_base": 0 if config.model.from_scratch is None else size.weight_bytes,
        "sft": _warm_start_bytes(config, size, trained),
        "train": (config.trainer.keep_checkpoints + 1) * checkpoint + result,
        "merge": size.weight_bytes,
    }
    return sum(needs.get(stage.name, 0) for stage in plan.stages if stage.state != "done")


def _warm_start_bytes(config: RunConfig, size: ModelSize, trained: int) -> int:
    """Checkpoints, and a whole model. `trained` counts the weights that EBFT trains."""
    if config.sft is not None and not config.sft.use_lora:
        trained = size.parameters
    return (config.trainer.keep_checkpoints + 1) * (4 + _ADAM_BYTES) * trained + size.weight_bytes


def model_size(config: RunConfig) -> ModelSize | None:
    """Size of a local base model or of one to be made; None for a hub id."""
    made = config.model.from_scratch
    if made is not None:
        vocabulary = 512 if made.tokenizer == "byte" else made.vocab_size
        layer = 4 * made.hidden_size**2 + 3 * made.hidden_size * made.intermediate_size
        count = 2 * vocabulary * made.hidden_size + made.num_hidden_layers * layer
        return ModelSize(count, 4 * count, made.hidden_size, made.intermediate_size, made.num_hidden_layers)
    folder = Path(config.model.name_or_path or "").expanduser()
    if config.model.name_or_path is None or not (folder / "config.json").is_file():
        return None
    shape = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    width = 4 if "float32" in str(shape.get("dtype", shape.get("torch_dtype"))) else 2
    hidden = int(shape.get("hidden_size", shape.get("n_embd", 0)))
    layers = int(shape.get("num_hidden_layers", shape.get("n_layer", 0)))
    return ModelSize(
        weights // width, weights, hidden, int(shape.get("intermediate_size", 4 * hidden)), layers
    )
