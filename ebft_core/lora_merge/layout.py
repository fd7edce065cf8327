"""What the tensors of a base model are: learnt from the architecture without any weights.

The model is built on torch's meta device, where tensors have shapes but no memory. A name alone does not
say whether a square matrix is stored (out, in) or, as GPT-2's Conv1D does, (in, out); the module does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ebft_core.errors import UserError


class ModuleKind(Enum):
    """How a weight matrix is stored."""

    LINEAR = "linear"  # (out, in)
    CONV1D = "conv1d"  # (in, out)
    EMBEDDING = "embedding"  # (vocab, hidden)


@dataclass(frozen=True)
class BaseLayout:
    """The modules of a base model.

    Attributes:
        kinds: module name -> how its weight is stored, for the modules that can carry an update.
        prefix: name of the decoder inside the causal model; old checkpoints leave it out of their keys.
        tied: parameter names (input embedding, output head) that are one tensor, or None.
    """

    kinds: Mapping[str, ModuleKind]
    prefix: str
    tied: tuple[str, str] | None


def read_layout(base: Path) -> BaseLayout:
    """The layout of the model folder `base`.

    Raises:
        UserError: no readable causal language model configuration, or one that needs code of its own.
    """
    try:
        config = AutoConfig.from_pretrained(base, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot read the base model's configuration: {error}", where=str(base)) from error
    kinds = {}
    for name, module in model.named_modules():
        kind = _kind(module)
        if kind is not None:
            kinds[name] = kind
    return BaseLayout(kinds, model.base_model_prefix, _tied_pair(model))


def _kind(module: nn.Module) -> ModuleKind | None:
    if isinstance(module, Conv1D):
        return ModuleKind.CONV1D
    if isinstance(module, nn.Embedding):
        return ModuleKind.EMBEDDING
    return ModuleKind.LINEAR if isinstance(module, nn.Linear) else None


def _tied_pair(model: PreTrainedModel) -> tuple[str, str] | None:
    source, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or source.weight is not head.weight:
        return None
    names = {module: name for name, module in model.named_modules()}
    return f"{names[source]}.weight", f"{names[head]}.weight"
