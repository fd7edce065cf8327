"""The parts of a causal language model that the core needs, found without knowing the family.

Also the refusal of architectures that the mask rule cannot describe: better a named refusal than
wrong numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from ebft_core.attention import use_ebft_attention
from ebft_core.errors import UserError

_SCALED_HEADS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Config attributes of models that change the logits behind the head; the chunked head does not know them."""


def unwrap_adapters(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT model (adapters stay active), or the model itself."""
    return model.get_base_model() if _is_peft(model) else model  # type: ignore[operator]


def backbone_of(model: nn.Module) -> nn.Module:
    """The model without its language-model head."""
    causal_lm = unwrap_adapters(model)
    return getattr(causal_lm, str(causal_lm.base_model_prefix))


def head_of(model: nn.Module) -> nn.Module:
    """The module that turns hidden states `(…, H)` into logits `(…, V)`."""
    return unwrap_adapters(model).get_output_embeddings()  # type: ignore[operator]


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list of decoder layers, first to last.

    Raises:
        UserError: the model has no single list of `num_hidden_layers` modules.
    """
    backbone = backbone_of(model)
    wanted = int(backbone.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]
    lists = [
        child for child in backbone.children() if isinstance(child, nn.ModuleList) and len(child) == wanted
    ]
    if len(lists) != 1:
        raise _refusal(model, "its decoder layers cannot be found")
    return lists[0]


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Run a PEFT model as its base model; other models are left alone."""
    with model.disable_adapter() if _is_peft(model) else nullcontext():  # type: ignore[operator]
        yield


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off inside the block; the previous mode comes back afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def check_supported(model: nn.Module, longest: int) -> None:
    """Check that the mask rule can describe the model's attention, and that its parts can be found.

    Args:
        longest: largest number of positions that will be used, in tokens.

    Raises:
        UserError: encoder-decoder, recurrent or linear attention, sliding windows shorter than
            `longest`, scaled or soft-capped logits, fewer positions than `longest`.
    """
    problem = _unsupported(unwrap_adapters(model).config, longest)
    if problem:
        raise _refusal(model, problem)
    decoder_layers(model)


def prepare_for_packing(model: nn.Module, longest: int) -> None:
    """Set our attention on the model, after `check_supported`."""
    check_supported(model, longest)
    use_ebft_attention(unwrap_adapters(model))


def _unsupported(config: Any, longest: int) -> str | None:
    if config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    values = config.to_dict()
    foreign = sorted(set(values.get("layer_types") or []) - {"full_attention", "sliding_attention"})
    if foreign:
        return f"it has layers that are not full attention: {', '.join(foreign)}"
    slides = "sliding_attention" in (values.get("layer_types") or ["sliding_attention"])
    window = values.get("sliding_window")
    if slides and window and values.get("use_sliding_window", True) and window < longest:
        return (
            f"its sliding attention window of {window} tokens is shorter than the {longest} tokens of a row"
        )
    for name in _SCALED_HEADS:
        if values.get(name) not in (None, 1, 1.0):
            return f"its logits are transformed behind the head ({name})"
    positions = getattr(config, "max_position_embeddings", None)  # some families keep it under another name
    if positions and positions < longest:
        return f"it has {positions} positions, fewer than the {longest} tokens of a row"
    return None


def _is_peft(model: nn.Module) -> bool:
    from peft import PeftModel

    return isinstance(model, PeftModel)


def _refusal(model: nn.Module, why: str) -> UserError:
    config: Any = unwrap_adapters(model).config
    return UserError(
        f"this model cannot be trained in strided mode: {why}",
        where="model.name_or_path",
        value=config.model_type,
        expected="a decoder-only model with full attention (Llama, Qwen2/3, Mistral, GPT-2, GPT-NeoX, …)",
        hint="choose another model, or a shorter data.sequence_length if a window or limit is named",
    )
