"""`merge_adapter`: base folder + adapter folder -> a complete model folder."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ebft_core.base_model import digest_model_folder
from ebft_core.errors import UserError
from ebft_core.lora_merge.adapter import Adapter, read_adapter
from ebft_core.lora_merge.delta import TensorUpdate
from ebft_core.lora_merge.layout import read_layout
from ebft_core.lora_merge.plan import MergePlan, plan_merge
from ebft_core.lora_merge.shards import (
    RoundingStatistics,
    WeightFiles,
    find_weight_files,
    write_index,
    write_shard,
)

# Other copies of the base's weights (the merge would not be in them), and an adapter configuration, which
# transformers would take for an adapter to load on top.
_LEFT_OUT = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt"),
    *("*.h5", "*.msgpack", "*.gguf", "*.onnx", "adapter_config.json", ".*"),
)


@dataclass(frozen=True)
class MergeReport:
    """What a merge did.

    Attributes:
        merged_tensors: tensors that a low-rank update went into.
        replaced_tensors: tensors that the adapter brought as a whole.
        untied_embeddings: the output head became a tensor of its own (`tie_word_embeddings` is now false).
        lost_to_rounding: norm of the rounding error divided by the norm of the update; 0 is none, 1 means
            that the base's number format is as coarse as the update is large.
        base_digest: digest of the base folder; digest_checked: whether the adapter had recorded one.
    """

    merged_tensors: int
    replaced_tensors: int
    untied_embeddings: bool
    shards: int
    bytes: int
    update_norm: float
    lost_to_rounding: float
    base_digest: str
    digest_checked: bool

    def to_json(self) -> dict[str, object]:
        """The report as JSON values."""
        return asdict(self)


def merge_adapter(
    base: Path,
    adapter: Path,
    output: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
    expected_base_digest: str | None = None,
) -> MergeReport:
    """Merge the PEFT adapter folder into a copy of the base folder.

    The weights are read and written in blocks of rows: memory stays below the adapter plus the largest
    shard plus a constant. Arithmetic is float32; every tensor keeps the base's number format. The result
    appears at `output` only when it is complete.

    Args:
        base: Hugging Face model folder with safetensors weights, single or sharded.
        adapter: PEFT folder; its `ebft.json` may record the digest of its base.
        output: folder to make; must not exist.
        progress: called with (bytes done, bytes in all).
        expected_base_digest: digest the caller knows the base by; a different one is an error.

    Raises:
        UserError: wrong base, an adapter that cannot be merged exactly, weights that are not safetensors.
    """
    if output.exists():
        raise UserError("the output folder exists", where=str(output), expected="a new path")
    if not base.is_dir():
        raise UserError("the base model is not a folder", where=str(base))
    loaded = read_adapter(adapter)
    # Hashing the base takes as long as writing the result, so it runs beside it on a core of its own.
    with ThreadPoolExecutor(max_workers=1) as hasher, _staging(output) as staging, _a_core_left():
        digest = hasher.submit(_check_digest, base, loaded, expected_base_digest)
        try:
            merged = _merge_into(staging, base, loaded, progress)
        except UserError:
            digest.result()  # a wrong base explains whatever else does not fit
            raise
        base_digest = digest.result()
    return _report(merged, base_digest, digest_checked=loaded.base_digest is not None)


@dataclass(frozen=True)
class _Merged:
    """What was written: file name -> tensor name -> bytes, and every change that was made."""

    sizes: dict[str, dict[str, int]]
    updates: list[TensorUpdate]
    untied: bool
    statistics: RoundingStatistics


def _merge_into(
    staging: Path, base: Path, adapter: Adapter, progress: Callable[[int, int], None] | None
) -> _Merged:
    files = find_weight_files(base)
    plan = plan_merge(adapter, read_layout(base), files.names)
    statistics = RoundingStatistics()
    _copy_other_files(base, staging)
    sizes = _write_shards(files, plan, staging, progress, statistics)
    if files.sharded:
        write_index(staging, sizes)
    if plan.untied:
        _set_untied(staging / "config.json")
    updates = [tensor.update for tensors in plan.outputs.values() for tensor in tensors if tensor.update]
    return _Merged(sizes, updates, plan.untied, statistics)


def _report(merged: _Merged, base_digest: str, *, digest_checked: bool) -> MergeReport:
    statistics = merged.statistics
    updates = [update for update in merged.updates if update.low_rank is not None]
    return MergeReport(
        merged_tensors=len(updates),
        replaced_tensors=len(merged.updates) - len(updates),
        untied_embeddings=merged.untied,
        shards=len(merged.sizes),
        bytes=sum(size for tensors in merged.sizes.values() for size in tensors.values()),
        update_norm=math.sqrt(statistics.update_square),
        lost_to_rounding=_ratio(statistics.rounding_square, statistics.update_square),
        base_digest=base_digest,
        digest_checked=digest_checked,
    )


@contextmanager
def _a_core_left() -> Iterator[None]:
    """Take one thread from torch: its threads wait for each other and would wait for the hashing one too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads - 1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _ratio(numerator_square: float, denominator_square: float) -> float:
    return math.sqrt(numerator_square / denominator_square) if denominator_square > 0 else 0.0


def _check_digest(base: Path, adapter: Adapter, expected: str | None) -> str:
    digest = digest_model_folder(base)
    if expected is not None and digest != expected:
        raise UserError("the base model has changed", where=str(base), value=digest, expected=expected)
    if adapter.base_digest is not None and digest != adapter.base_digest:
        raise UserError(
            "the adapter was trained on another base model",
            where=str(adapter.path),
            value=f"base at {base} has digest {digest}",
            expected=f"digest {adapter.base_digest}",
            hint="give the base model of the run that trained this adapter",
        )
    return digest


@contextmanager
def _staging(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its name if the body succeeds and vanishes if it fails."""
    staging = output.with_name(f".{output.name}.partial")
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    try:
        yield staging
        staging.rename(output)
    except BaseException:
        shutil.rmtree(staging)
        raise


def _copy_other_files(base: Path, target: Path) -> None:
    shutil.copytree(base, target, ignore=shutil.ignore_patterns(*_LEFT_OUT), dirs_exist_ok=True)


def _write_shards(
    files: WeightFiles,
    plan: MergePlan,
    staging: Path,
    progress: Callable[[int, int], None] | None,
    statistics: RoundingStatistics,
) -> dict[str, dict[str, int]]:
    total = sum((files.folder / file).stat().st_size for file in files.tensors)
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done = min(done + count, total)  # an untied head makes the output longer than the input
        if progress is not None:
            progress(done, total)

    sizes = {}
    for file, names in files.tensors.items():
        outputs = [output for name in names for output in plan.outputs[name]]
        sizes[file] = write_shard(
            files.folder / file, staging / file, outputs, on_bytes=on_bytes, statistics=statistics
        )
    if progress is not None:
        progress(total, total)
    return sizes


def _set_untied(config_file: Path) -> None:
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = False
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
