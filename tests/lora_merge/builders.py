"""Tiny random bases and adapters. Every tensor of an adapter is random: nothing is merged by accident."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
)

VOCAB = 61
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}

CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES, **HEADS, **SPECIAL),
    "llama_tied": lambda: LlamaConfig(**SIZES, **HEADS, **SPECIAL, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, **HEADS, **SPECIAL, head_dim=8),
    "gpt2": lambda: GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=64, **SPECIAL),
    "gpt_neox": lambda: GPTNeoXConfig(**SIZES, num_attention_heads=2, **SPECIAL),
}


def save_base(folder: Path, name: str, *, dtype: torch.dtype = torch.float32, max_shard: str = "5GB") -> Path:
    """Save a random model with weights large enough that rounding and updates both matter."""
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size=max_shard)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def save_adapter(base: Path, folder: Path, **options: Any) -> Path:
    """Train nothing: fill every trainable tensor with noise and save the adapter."""
    torch.manual_seed(7)
    options = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(load(base), LoraConfig(task_type="CAUSAL_LM", **options))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(folder)
    return folder


def adapted(base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> PeftModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(load(base, dtype), adapter).eval()


def prompt() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(3))
