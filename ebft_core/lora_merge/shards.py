"""Read and write safetensors files tensor by tensor, in blocks of rows.

safetensors' own `save_file` takes all tensors of a file at once and copies each of them to bytes; this
writer holds one block of rows, so memory does not grow with the shard.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ebft_core.errors import UserError
from ebft_core.lora_merge.delta import TensorUpdate, row_merger
from ebft_core.lora_merge.plan import OutputTensor

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
BLOCK_ELEMENTS = 2**18  # 1 MB of float32: stays in the cache, and the allocator keeps it for the next block

_ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
_MERGEABLE = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class WeightFiles:
    """The weight files of a model folder: file name -> names of its tensors, in storage order."""

    folder: Path
    tensors: Mapping[str, Sequence[str]]
    sharded: bool

    @property
    def names(self) -> frozenset[str]:
        """Every tensor of the model."""
        return frozenset(name for names in self.tensors.values() for name in names)


@dataclass
class RoundingStatistics:
    """How much of the update survives the base's number format: squared norms of both, summed in float64."""

    update_square: float = 0.0
    rounding_square: float = 0.0

    def add(self, base: Tensor, merged: Tensor, stored: Tensor) -> None:
        """Count one block of rows (all in float32 but `stored`)."""
        self.update_square += _square_norm(merged - base)
        if stored.dtype != torch.float32:  # else nothing was rounded
            self.rounding_square += _square_norm(stored.float() - merged)


def find_weight_files(folder: Path) -> WeightFiles:
    """The safetensors files of a model folder, sharded or single.

    Raises:
        UserError: none there, pickled only, or files that disagree with their index.
    """
    index_file = folder / INDEX_FILE
    if index_file.is_file():
        weight_map: dict[str, str] = json.loads(index_file.read_text(encoding="utf-8"))["weight_map"]
        files = {file: _tensor_names(folder / file) for file in sorted(set(weight_map.values()))}
        found = {name: file for file, names in files.items() for name in names}
        if found != weight_map:
            odd = sorted(set(found.items()) ^ set(weight_map.items()))[0][0]
            raise UserError("the shards disagree with their index", where=str(index_file), value=odd)
        return WeightFiles(folder, files, True)
    if (folder / SINGLE_FILE).is_file():
        return WeightFiles(folder, {SINGLE_FILE: _tensor_names(folder / SINGLE_FILE)}, False)
    pickled = any(folder.glob("*.bin"))
    raise UserError(
        "the base model's weights are pickled" if pickled else "no model weights here",
        where=str(folder),
        expected=f"{SINGLE_FILE} or {INDEX_FILE}",
        hint="convert them: load the model once with transformers and save_pretrained it"
        if pickled
        else None,
    )


def stored_dtypes(folder: Path) -> frozenset[str]:
    """The number formats in a model folder, by their safetensors names (`F32`, `BF16`, …)."""
    found = set()
    for file, names in find_weight_files(folder).tensors.items():
        with safe_open(folder / file, framework="pt") as shard:
            found |= {shard.get_slice(name).get_dtype() for name in names}
    return frozenset(found)


def write_shard(
    source: Path,
    target: Path,
    outputs: Sequence[OutputTensor],
    *,
    on_bytes: Callable[[int], None],
    statistics: RoundingStatistics,
) -> dict[str, int]:
    """Write `outputs` (all from tensors of `source`) to `target`. Returns tensor name -> bytes."""
    with safe_open(source, framework="pt") as shard, target.open("wb") as file:
        header: dict[str, Any] = {"__metadata__": shard.metadata() or {"format": "pt"}}
        sizes: dict[str, int] = {}
        offset = 0
        for output in outputs:
            part = shard.get_slice(output.source)
            dtype, shape = part.get_dtype(), tuple(part.get_shape())
            _check_output(output, dtype, shape, source)
            sizes[output.name] = _ITEM_BYTES[dtype] * torch.Size(shape).numel()
            end = offset + sizes[output.name]
            header[output.name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        _write_header(file, header)
        for output in outputs:
            part = shard.get_slice(output.source)
            if not part.get_shape():
                _write_scalar(file, shard.get_tensor(output.source), output.update)
            else:
                _write_rows(file, part, output.update, on_bytes, statistics)
        file.flush()
        os.fsync(file.fileno())
    return sizes


def write_index(folder: Path, sizes: Mapping[str, Mapping[str, int]]) -> None:
    """Write the index of a sharded model: `sizes` is file name -> tensor name -> bytes."""
    weight_map = {name: file for file, tensors in sizes.items() for name in tensors}
    total = sum(size for tensors in sizes.values() for size in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _tensor_names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as shard:
            return list(shard.offset_keys())
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read a weight file: {error}", where=str(file)) from error


def _check_output(output: OutputTensor, dtype: str, shape: tuple[int, ...], source: Path) -> None:
    if dtype not in _ITEM_BYTES or (output.update is not None and dtype not in _MERGEABLE):
        raise UserError(
            "cannot merge into weights of this number format",
            where=f"{source}: {output.source}",
            value=dtype,
            expected=", ".join(_MERGEABLE),
            hint="merge into the base model before it was quantised",
        )
    if output.update is not None:
        output.update.check_shape(output.name, shape)


def _write_header(file: IO[bytes], header: Mapping[str, Any]) -> None:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format asks for data aligned to 8 bytes
    file.write(struct.pack("<Q", len(text)) + text)


def _write_scalar(file: IO[bytes], value: Tensor, update: TensorUpdate | None) -> None:
    if update is not None and update.replacement is not None:
        value = update.replacement.to(value.dtype)
    _write_tensor(file, value.reshape(1))


def _write_rows(
    file: IO[bytes],
    part: Any,
    update: TensorUpdate | None,
    on_bytes: Callable[[int], None],
    statistics: RoundingStatistics,
) -> None:
    shape = torch.Size(part.get_shape())
    rows = shape[0]
    step = max(1, BLOCK_ELEMENTS // max(1, shape[1:].numel()))
    read_merged = (
        None if update is None else row_merger(update, lambda start, stop: part[start:stop], rows, step)
    )
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        stored = part[start:stop]
        if read_merged is not None:
            base, merged = stored.float(), read_merged(start, stop)
            stored = merged.to(stored.dtype)
            statistics.add(base, merged, stored)
        _write_tensor(file, stored)
        on_bytes(stored.nbytes)


def _square_norm(block: Tensor) -> float:
    flat = block.flatten()
    return float(flat @ flat)


def _write_tensor(file: IO[bytes], tensor: Tensor) -> None:
    file.write(tensor.contiguous().view(torch.uint8).numpy().data)
