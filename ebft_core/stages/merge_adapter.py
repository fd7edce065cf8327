"""Stage `merge`: a complete model folder, from base + adapter or from full fine-tuning."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ebft_core.base_model import read_start
from ebft_core.data.store import read_rows
from ebft_core.lora_merge import check_merge, merge_adapter
from ebft_core.manifests import write_json_atomic
from ebft_core.stage_runner import Preempted, StageContext

CHECK_PROMPTS = 4
CHECK_TOKENS = 32
"""Held-out rows, and tokens of each, on which the merged model is compared with base + adapter."""

COARSE_ROUNDING = 0.5
"""Share of the update lost to the base's number format above which people are told."""


def run(context: StageContext) -> dict[str, Any]:
    """Write `model/` and `merge.json`.

    Raises:
        UserError: the adapter does not belong to the base. Preempted: asked to stop.
        RuntimeError: the merged model does not compute what base + adapter compute.
    """
    train = context.inputs["train"]
    target = context.output / "model"
    adapter = train / "adapter"
    result = _merge(context, adapter, target) if adapter.is_dir() else _adopt(train / "model", target)
    write_json_atomic(context.output / "merge.json", result)
    return result


def _merge(context: StageContext, adapter: Path, target: Path) -> dict[str, Any]:
    base = read_start(context.inputs)
    context.events.phase("merge")
    report = merge_adapter(
        base.path, adapter, target, progress=_reporter(context), expected_base_digest=base.digest
    )
    if report.lost_to_rounding > COARSE_ROUNDING:
        context.events.message(
            f"{report.lost_to_rounding:.0%} of the adapter's update is lost in the base's number format: "
            "the merged model is closer to the base than what was trained"
        )
    context.events.phase("check merge")
    rows = read_rows(context.inputs["tokenize"] / "train")  # held-out rows there may be none
    prompts = [rows[i]["input_ids"][:CHECK_TOKENS] for i in range(min(CHECK_PROMPTS, len(rows)))]
    check = check_merge(base.path, adapter, target, prompts_ids=prompts)
    return {"kind": "merged", **report.to_json(), "check": check.to_json()}


def _reporter(context: StageContext) -> Callable[[int, int], None]:
    """Report each whole per cent, and stop between blocks if asked to."""
    last = -1

    def progress(done: int, total: int) -> None:
        nonlocal last
        if context.stop.requested:
            raise Preempted(f"stopped while merging: {context.stop.reason}")
        percent = 100 * done // max(total, 1)
        if percent > last:
            last = percent
            context.events.progress("merge", done, total, "bytes")

    return progress


def _adopt(model: Path, target: Path) -> dict[str, Any]:
    """Full fine-tuning: the trained folder is the model. Links, where the file system can, save its size."""

    def link_or_copy(source: str, destination: str) -> str:
        try:
            os.link(source, destination)
        except OSError:  # another file system, or one without links
            shutil.copy2(source, destination)
        return destination

    shutil.copytree(model, target, copy_function=link_or_copy)
    files = [path for path in target.rglob("*") if path.is_file()]
    return {"kind": "full", "files": len(files), "bytes": sum(path.stat().st_size for path in files)}
