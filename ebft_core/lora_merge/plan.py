"""Decide what every tensor of the base becomes, before anything is written.

Tied embeddings: PEFT trains an update of one of two tied modules as if they were two tensors (the other
keeps the base weight), but its own `merge_and_unload` then changes both. Here the merged model computes
what was trained: if the two differ after merging they become two tensors and the configuration says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from ebft_core.errors import UserError
from ebft_core.lora_merge.adapter import Adapter
from ebft_core.lora_merge.delta import TensorUpdate, low_rank_update
from ebft_core.lora_merge.layout import BaseLayout


@dataclass(frozen=True)
class OutputTensor:
    """A tensor of the merged model: its name, the base tensor it comes from, and what changes."""

    name: str
    source: str
    update: TensorUpdate | None


@dataclass(frozen=True)
class MergePlan:
    """Base tensor name -> the tensors written in its place; `untied`: the head became a tensor of its own."""

    outputs: Mapping[str, Sequence[OutputTensor]]
    untied: bool


def plan_merge(adapter: Adapter, layout: BaseLayout, base_tensors: Set[str]) -> MergePlan:
    """Match every weight of the adapter with a base tensor.

    Raises:
        UserError: a weight of the adapter matches no base tensor, or a module that cannot carry it.
    """
    updates = _updates_by_parameter(adapter, layout)
    outputs = {name: [OutputTensor(name, name, None)] for name in base_tensors}
    untied = _plan_tied(updates, layout, base_tensors, outputs)
    for parameter, update in updates.items():
        name = _stored_name(parameter, layout, base_tensors)
        if name is None:
            raise UserError(
                "the adapter has weights for a tensor that the base model does not have",
                where=str(adapter.path),
                value=parameter,
                expected="every weight of the adapter used",
                hint="it belongs to another base model",
            )
        outputs[name] = [OutputTensor(name, name, update)]
    return MergePlan(outputs, untied)


def _updates_by_parameter(adapter: Adapter, layout: BaseLayout) -> dict[str, TensorUpdate]:
    updates = {name: TensorUpdate(replacement=tensor) for name, tensor in adapter.replacements.items()}
    for module, factors in adapter.low_rank.items():
        kind = layout.kinds.get(module)
        if kind is None:
            raise UserError(
                "the adapter updates a module that the base model does not have, or not as a plain linear "
                "layer or embedding",
                where=str(adapter.path),
                value=module,
                hint="it belongs to another base model",
            )
        parameter = f"{module}.weight"
        replacement = adapter.replacements.get(parameter)
        updates[parameter] = TensorUpdate(replacement, low_rank_update(factors, kind))
    return updates


def _plan_tied(
    updates: dict[str, TensorUpdate],
    layout: BaseLayout,
    base_tensors: Set[str],
    outputs: dict[str, list[OutputTensor]],
) -> bool:
    """Plan the tied pair, taking its updates out of `updates`. Returns whether the pair is untied."""
    if layout.tied is None or not set(layout.tied) & set(updates):
        return False
    names = [_stored_name(parameter, layout, base_tensors) for parameter in layout.tied]
    stored = [name for name in names if name is not None]
    if len(stored) != 1:  # both on disk: transformers does not tie them; none: reported by the caller
        return False
    pair = [updates.pop(parameter, TensorUpdate()) for parameter in layout.tied]
    source = stored[0]
    if pair[0].equals(pair[1]):
        outputs[source] = [OutputTensor(source, source, pair[0])]
        return False
    outputs[source] = [
        OutputTensor(name or parameter, source, update if update.changes else None)
        for name, parameter, update in zip(names, layout.tied, pair, strict=True)
    ]
    return True


def _stored_name(parameter: str, layout: BaseLayout, base_tensors: Set[str]) -> str | None:
    # Checkpoints of the bare decoder (GPT-2's on the hub) leave out the decoder's name.
    for name in (parameter, parameter.removeprefix(f"{layout.prefix}.")):
        if name in base_tensors:
            return name
    return None
