"""Read a PEFT LoRA adapter: its configuration and its weights, by base module.

Only what is known to be merged exactly is accepted. An option that changes the arithmetic and is not
handled here is refused by name; nothing in the weight file may be left unused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ebft_core.errors import UserError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
RECORD_FILE = "ebft.json"

# Each of these, when set, changes what the adapter computes in a way a plain low-rank update does not cover.
REFUSED_OPTIONS = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
)
# Other initialisations (pissa, olora, corda, loftq, …) subtract the initial update from the base weights, so
# the saved factors are relative to a base that is not on disk.
PLAIN_INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal")

_FACTOR_KEY = re.compile(
    r"(?P<module>.+)\.(?:lora_(?P<side>[AB])\.weight|lora_embedding_(?P<embedding_side>[AB])"
    r"|(?P<magnitude>lora_magnitude_vector)(?:\.weight)?)"
)


@dataclass(frozen=True)
class LoraFactors:
    """The update of one module: scale · B @ A, with DoRA's magnitude if the adapter has one.

    Shapes: linear layers a (r, in), b (out, r), magnitude (out); embeddings a (r, vocab), b (hidden, r),
    magnitude (hidden).
    """

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None


@dataclass(frozen=True)
class Adapter:
    """An adapter in memory.

    Attributes:
        low_rank: base module name -> its factors.
        replacements: base parameter name -> the trained tensor that takes its place (`modules_to_save`,
            trained biases, and the copies of embedding weights that PEFT saves beside their factors).
        base_digest: digest of the base model the adapter was trained on; None if nobody recorded it.
    """

    path: Path
    low_rank: Mapping[str, LoraFactors]
    replacements: Mapping[str, Tensor]
    base_digest: str | None


@dataclass
class _Parts:
    tensors: dict[str, Tensor] = field(default_factory=dict)


def read_adapter(path: Path) -> Adapter:
    """Read the adapter folder `path`.

    Raises:
        UserError: not a PEFT LoRA folder, pickled weights, an option that cannot be merged, incomplete or
            non-finite weights.
    """
    config = _read_config(path)
    parts: dict[str, _Parts] = {}
    replacements: dict[str, Tensor] = {}
    for key, tensor in _read_weights(path).items():
        name = key.removeprefix("base_model.model.")
        match = _FACTOR_KEY.fullmatch(name)
        if match is None:
            replacements[name.replace(".base_layer.", ".")] = tensor
            continue
        part = match["side"] or match["embedding_side"] or "magnitude"
        parts.setdefault(match["module"], _Parts()).tensors[part] = tensor
    low_rank = {module: _factors(module, part.tensors, config, path) for module, part in parts.items()}
    if not low_rank and not replacements:
        raise UserError("the adapter has no weights", where=str(path / WEIGHTS_FILE))
    return Adapter(path, low_rank, replacements, _read_base_digest(path))


def _read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG_FILE
    if not file.is_file():
        raise UserError("no PEFT adapter here", where=str(path), expected=f"a folder with {CONFIG_FILE}")
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"broken adapter configuration: {error}", where=str(file)) from error
    if config.get("peft_type") != "LORA":
        raise UserError(
            "only LoRA adapters can be merged",
            where=str(file),
            value=config.get("peft_type"),
            expected="LORA",
        )
    for option in REFUSED_OPTIONS:
        if config.get(option):
            raise UserError(
                f"adapters with {option} cannot be merged",
                where=str(file),
                value=config[option],
                expected="unset",
            )
    initialisation = config.get("init_lora_weights", True)
    if initialisation not in PLAIN_INITIALISATIONS:
        raise UserError(
            "this initialisation changes the base weights, which the base folder does not show",
            where=f"{file}: init_lora_weights",
            value=initialisation,
            expected="an initialisation that leaves the base as it is",
            hint="convert the adapter to plain LoRA with PEFT's path_initial_model_for_weight_conversion",
        )
    return config


def _read_weights(path: Path) -> dict[str, Tensor]:
    file = path / WEIGHTS_FILE
    if not file.is_file():
        pickled = (path / "adapter_model.bin").exists()
        raise UserError(
            "the adapter's weights are pickled" if pickled else "the adapter has no weight file",
            where=str(path),
            expected=WEIGHTS_FILE,
            hint="save it again with safe_serialization=True" if pickled else None,
        )
    try:
        with safe_open(file, framework="pt") as weights:
            tensors = {key: weights.get_tensor(key) for key in weights.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise UserError(f"broken weight file: {error}", where=str(file)) from error
    for key, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise UserError(
                "the adapter has weights that are not finite numbers",
                where=str(file),
                value=key,
                hint="the training run diverged; use an earlier checkpoint",
            )
    return tensors


def _factors(
    module: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any], path: Path
) -> LoraFactors:
    where = f"{path / WEIGHTS_FILE}: {module}"
    if not {"A", "B"} <= set(tensors):
        raise UserError(
            "incomplete update", where=where, value=sorted(tensors), expected="both lora_A and lora_B"
        )
    if bool(config.get("use_dora")) != ("magnitude" in tensors):
        raise UserError("use_dora and the weights disagree", where=where, value=sorted(tensors))
    rank = int(_by_pattern(config.get("rank_pattern"), module, config["r"]))
    alpha = float(_by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"]))
    a, b = tensors["A"], tensors["B"]
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise UserError(
            "the update's shape does not fit its rank",
            where=where,
            value=f"A {tuple(a.shape)}, B {tuple(b.shape)}",
            expected=f"A ({rank}, in), B (out, {rank})",
        )
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return LoraFactors(a, b, scale, tensors.get("magnitude"))


def _by_pattern(pattern: Mapping[str, float] | None, module: str, default: float) -> float:
    # PEFT's own matching: the keys are regular expressions over the end of the module name.
    return (pattern or {}).get(get_pattern_key(list(pattern or {}), module), default)


def _read_base_digest(path: Path) -> str | None:
    file = path / RECORD_FILE
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"broken record: {error}", where=str(file)) from error
    digest = record.get("base_digest")
    return None if digest is None else str(digest)
