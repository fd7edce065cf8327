"""The random models the benchmarks run on."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def llama_28m() -> LlamaForCausalLM:
    """28M parameters: hidden 512, 8 layers, 8 heads, 4 key-value heads, vocabulary 8192, tied."""
    return _llama(512, 1408, 8, 8, 4, 8192)


def llama_tiny() -> LlamaForCausalLM:
    """A few thousand parameters: the path of a benchmark, not a figure."""
    return _llama(32, 48, 4, 4, 2, 64)


def llama_3m() -> LlamaForCausalLM:
    """3M parameters, for long rows on a CPU."""
    return _llama(192, 512, 6, 6, 6, 512)


def llama_1b() -> LlamaForCausalLM:
    """1.2B parameters in the shape of Llama-3.2-1B."""
    return _llama(2048, 8192, 16, 32, 8, 128256)


def _llama(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int
) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)
