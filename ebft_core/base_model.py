"""The base model: where it is, what it is made of, and whether this project can use it.

Torch-free, so that the planner can digest a model folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebft_core.errors import UserError
from ebft_core.manifests import digest_files, write_json_atomic

BASE_JSON = "base.json"
_INDEX = "model.safetensors.index.json"
_DIGESTED_SUFFIXES = frozenset({".safetensors", ".json", ".model", ".txt", ".jinja", ".tiktoken"})
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class BaseModelInfo:
    """What stage `prepare_base` found out or made.

    Args:
        path: the model's folder, absolute.
        digest: hex sha256 over names and contents of its weights, configuration and tokenizer files.
        source: hub id, folder, or `from_scratch`.
        revision: commit of a hub model.
        metrics: of a model made here: `heldout_ce` (nats per token), `train_ce`, `steps`, `seconds`, ….
    """

    path: Path
    digest: str
    source: str
    revision: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def digest_model_folder(folder: Path) -> str:
    """Hex sha256 over the names and contents of a model's files.

    Weights, configuration and tokenizer files at the top of the folder count; read-me files, pickled
    copies of the weights and sub-folders do not.

    Raises:
        UserError: the folder holds no such file.
    """
    files = [p for p in sorted(folder.iterdir()) if p.is_file() and _is_model_file(p)]
    if not files:
        raise UserError(
            "no model in this folder", where=str(folder), expected="config.json and *.safetensors"
        )
    return digest_files(files)


def write_base(output: Path, info: BaseModelInfo) -> None:
    """Write `base.json`; a model inside `output` is stored by its relative path."""
    inside = info.path.is_relative_to(output)
    document = {
        "path": info.path.relative_to(output).as_posix() if inside else str(info.path.resolve()),
        "digest": info.digest,
        "source": info.source,
        "revision": info.revision,
        "metrics": dict(info.metrics),
    }
    write_json_atomic(output / BASE_JSON, document)


def read_base(folder: Path) -> BaseModelInfo:
    """The result of stage `prepare_base` in its committed folder.

    Raises:
        UserError: the model's folder has gone since (a local model moved, a hub cache emptied).
    """
    document = json.loads((folder / BASE_JSON).read_text(encoding="utf-8"))
    path = folder / document["path"]  # an absolute path replaces the folder
    if not path.is_dir():
        raise UserError(
            "the base model's folder is gone",
            where=str(path),
            value=document["source"],
            hint=f"put it back, or delete {folder} so that it is prepared again",
        )
    return BaseModelInfo(
        path.resolve(), document["digest"], document["source"], document["revision"], document["metrics"]
    )


def read_start(inputs: Mapping[str, Path]) -> BaseModelInfo:
    """The model that EBFT starts from: the warm start's where the run has one, else the base model.

    Args:
        inputs: stage -> its committed folder.

    Raises:
        UserError: as `read_base`.
    """
    return read_base(inputs["sft"] if "sft" in inputs else inputs["prepare_base"])


def read_model_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder. Raises UserError if it is missing or not a JSON object."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            "no readable config.json",
            where=str(path),
            expected="a transformers model folder",
            hint=str(error),
        ) from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise UserError(
            "config.json names no model_type", where=str(path), expected="a transformers model folder"
        )
    return config


def embedding_size(folder: Path) -> int:
    """Rows of the model's token embedding, from its configuration."""
    config = read_model_config(folder)
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int):
        raise UserError("config.json has no vocab_size", where=str(folder / "config.json"))
    return size


def check_model_folder(folder: Path, *, where: str) -> None:
    """Refuse a folder that is not a causal language model in safetensors with all its shards.

    Raises:
        UserError: at config key `where`.
    """
    config = read_model_config(folder)
    names = config.get("architectures") or []
    if not any("CausalLM" in name or "LMHead" in name or "ConditionalGeneration" in name for name in names):
        raise UserError(
            "not a causal language model", where=where, value=names, expected="an architecture …ForCausalLM"
        )
    missing = [name for name in _weight_files(folder, where) if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"{len(missing)} weight file(s) named by {_INDEX} are missing", where=where, value=missing[:5]
        )


def _weight_files(folder: Path, where: str) -> list[str]:
    index = folder / _INDEX
    if index.is_file():
        try:
            return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise UserError("damaged index of the weights", where=str(index), hint=repr(error)) from error
    weights = sorted(path.name for path in folder.glob("*.safetensors"))
    if weights:
        return weights
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    raise UserError(
        "only pickled weights, which can run code when they are read"
        if pickled
        else "no weights in this folder",
        where=where,
        value=pickled[:3] or str(folder),
        expected="*.safetensors",
        hint="convert once: load the model with transformers and `save_pretrained` it" if pickled else None,
    )


def _is_model_file(path: Path) -> bool:
    return path.suffix in _DIGESTED_SUFFIXES and path.name not in (
        "manifest.json",
        "README.txt",
        "LICENSE.txt",
    )
