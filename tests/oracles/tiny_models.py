"""Tiny random causal language models of several architectures.

The weights are drawn so that next-token distributions are far from uniform and every bias and norm
weight is non-trivial: a path that forgets one of them must show.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HIDDEN = 32
_ROPE = dict(
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_attention_heads=4,
    max_position_embeddings=128,
    attention_dropout=0.0,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)


def _llama(vocab: int, layers: int) -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=vocab, num_hidden_layers=layers, num_key_value_heads=2, **_ROPE)
    )


def _qwen2(vocab: int, layers: int) -> PreTrainedModel:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocab,
            num_hidden_layers=layers,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            **_ROPE,
        )
    )


def _qwen3(vocab: int, layers: int) -> PreTrainedModel:
    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=vocab, num_hidden_layers=layers, num_key_value_heads=1, head_dim=16, **_ROPE)
    )


def _mistral(vocab: int, layers: int) -> PreTrainedModel:
    return MistralForCausalLM(
        MistralConfig(
            vocab_size=vocab, num_hidden_layers=layers, num_key_value_heads=4, sliding_window=None, **_ROPE
        )
    )


def _gpt2(vocab: int, layers: int) -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=vocab,
        n_embd=HIDDEN,
        n_layer=layers,
        n_head=4,
        n_positions=128,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def _gpt_neox(vocab: int, layers: int) -> PreTrainedModel:
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=vocab,
            num_hidden_layers=layers,
            rotary_pct=0.5,
            hidden_dropout=0.0,
            **_ROPE,
        )
    )


BUILDERS: dict[str, Callable[[int, int], PreTrainedModel]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}
ARCHITECTURES = tuple(BUILDERS)


def _is_norm(name: str) -> bool:
    return "norm" in name or ".ln_" in name


def _redraw(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Draw every parameter anew: matrices of gain about 1, a head of logit scale about 2."""
    head = model.get_output_embeddings().weight
    embedding = model.get_input_embeddings().weight
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter is head:  # also the tied case
            value = noise * 2.0 * HIDDEN**-0.5
        elif parameter is embedding or "wpe" in name:
            value = noise * 0.5
        elif parameter.ndim >= 2:
            value = noise * 1.3 * HIDDEN**-0.5
        elif _is_norm(name) and name.endswith("weight"):
            value = 1.0 + 0.2 * noise
        else:
            value = 0.2 * noise
        parameter.data.copy_(value)


def tiny_model(
    architecture: str, *, vocab: int = 37, layers: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A seeded random model in eval mode, on the CPU, without an end-of-sequence token."""
    model = BUILDERS[architecture](vocab, layers)
    _redraw(model, torch.Generator().manual_seed(1000 + seed))
    model.generation_config.eos_token_id = None
    model.generation_config.bos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(dtype).eval()


def with_lora(model: PreTrainedModel, *, seed: int = 0, rank: int = 4, scale: float = 0.3) -> PeftModel:
    """`model` wrapped in LoRA adapters whose B is NOT zero, so that adapters on and off differ."""
    adapter = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        fan_in_fan_out=isinstance(model, GPT2LMHeadModel),  # GPT-2's Conv1D stores transposed weights
    )
    peft_model = get_peft_model(model, adapter)
    generator = torch.Generator().manual_seed(2000 + seed)
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            gain = scale * parameter.shape[-1] ** -0.5
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * gain)
    return peft_model.eval()


def with_dropout(model: PreTrainedModel, probability: float) -> PreTrainedModel:
    """Switch the model's dropout modules to `probability` (GPT-2 has such modules everywhere)."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = probability
    return model
