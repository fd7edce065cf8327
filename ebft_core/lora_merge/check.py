"""`check_merge`: does the merged model compute what base + adapter compute?"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ebft_core.errors import UserError
from ebft_core.lora_merge.shards import stored_dtypes

# The arithmetic below is float32, so what remains is the rounding of the merged weights to the base's format.
TOLERANCES = {"F64": 1e-4, "F32": 1e-4, "F16": 5e-3, "BF16": 2e-2}


@dataclass(frozen=True)
class MergeCheck:
    """Distances between logits, as norms over all prompts divided by the norm of the tuned logits.

    Attributes:
        error: base + adapter against merged.
        effect: base + adapter against base alone, for comparison.
        tolerance: the largest `error` accepted.
    """

    error: float
    effect: float
    tolerance: float
    prompts: int

    def to_json(self) -> dict[str, float | int]:
        """The check as JSON values."""
        return asdict(self)


def check_merge(
    base: Path,
    adapter: Path,
    merged: Path,
    *,
    prompts_ids: Sequence[Sequence[int]],
    tolerance: float | None = None,
) -> MergeCheck:
    """Compare logits(base + adapter), computed by PEFT, with logits(merged) on a few prompts.

    One model is in memory at a time, in float32.

    Args:
        prompts_ids: token ids, a few short prompts.
        tolerance: largest relative distance; None: by the number format of the merged weights.

    Raises:
        UserError: no prompts.
        RuntimeError: the distance is past the tolerance, or not a number.
    """
    prompts = [torch.tensor([list(ids)]) for ids in prompts_ids if len(ids) > 0]
    if not prompts:
        raise UserError("the merge check needs at least one prompt", where="prompts_ids")
    model = PeftModel.from_pretrained(_load(base), adapter)
    model.eval()
    tuned = _logits(model, prompts)
    with model.disable_adapter():
        untuned = _logits(model, prompts)
    del model
    gc.collect()
    merged_model = _load(merged)
    result = _logits(merged_model, prompts)
    if tolerance is None:
        tolerance = max(TOLERANCES.get(name, 0.0) for name in stored_dtypes(merged))
    check = MergeCheck(_distance(result, tuned), _distance(untuned, tuned), tolerance, len(prompts))
    if not check.error <= tolerance:
        raise RuntimeError(
            f"the merged model at {merged} does not compute what base + adapter compute: relative distance "
            f"of the logits {check.error:.2e}, tolerance {tolerance:.0e}, adapter's effect {check.effect:.2e}"
        )
    return check


def _load(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, local_files_only=True
    )
    return model.eval()


@torch.no_grad()
def _logits(model: PreTrainedModel | PeftModel, prompts: Sequence[Tensor]) -> list[Tensor]:
    return [model(input_ids=ids).logits[0].float() for ids in prompts]


def _distance(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    squares = [(a - b).square().sum(dtype=torch.float64) for a, b in zip(left, right, strict=True)]
    norms = [b.square().sum(dtype=torch.float64) for b in right]
    return float((torch.stack(squares).sum() / torch.stack(norms).sum()).sqrt())
