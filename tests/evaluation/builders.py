"""Tiny models, rows and run configurations for the evaluation's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from ebft_core.config import RunConfig, parse_config

VOCAB = 23
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def tiny_model(architecture: str = "llama", seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    if architecture == "gpt2":
        config: Any = GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=4, n_head=2, n_positions=64, **SPECIAL)
    else:
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=2,
            max_position_embeddings=64,
            **SPECIAL,
        )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def run_config(**ebft: Any) -> RunConfig:
    """A small run; keyword arguments change section `ebft`."""
    settings = {"stride": 5, "context_length": 4, "generate_max_len": 3, "temperature": 0.7, **ebft}
    return parse_config(
        {
            "model": {"name_or_path": "unused"},
            "data": {"sources": [{"path": "unused.txt"}]},
            "ebft": settings,
            "trainer": {"device": "cpu", "precision": "float32"},
            "evaluate": {
                "max_rows": 8,
                "n_samples": 3,
                "batch_rows": 2,
                "bootstrap_samples": 200,
                "sample_rollouts": 3,
            },
        }
    )


STOPS = [1, 5]
"""Tokens that end a turn of the structured examples."""


def structured_config(**ebft: Any) -> RunConfig:
    """A small run of whole completions; keyword arguments change section `ebft`."""
    settings = {"mode": "structured", "max_completion_length": 18, "temperature": 0.8, **ebft}
    settings = {"n_samples_per_prompt": 2, **settings}
    strided = run_config().model_dump()
    return parse_config(
        {
            "model": {"name_or_path": "unused"},
            "data": {"sources": [{"path": "unused.jsonl"}], "transform": "prompt_completion"},
            "ebft": settings,
            "rollout": {"use_vllm": False},
            "trainer": {"device": "cpu", "precision": "float32"},
            "evaluate": strided["evaluate"],
        }
    )


def make_example(prompt: int, turns: list[int], seed: int, *, given: int = 3) -> dict[str, Any]:
    """A structured row: `prompt` tokens, then turns of these lengths with `given` tokens between them."""
    generator = torch.Generator().manual_seed(seed)
    on = [False] * prompt
    for number, length in enumerate(turns):
        on += [False] * (given if number else 0) + [True] * length
    ids = torch.randint(6, VOCAB, (len(on),), generator=generator).tolist()
    for i, here in enumerate(on):
        if here and (i + 1 == len(on) or not on[i + 1]):
            ids[i] = STOPS[0]
    return {
        "input_ids": ids,
        "labels": [token if here else -100 for token, here in zip(ids, on, strict=True)],
        "is_target": on,
        "document_lengths": [len(ids)],
        "prompt_lengths": [prompt],
        "document_hashes": [f"doc-{seed}"],
        "row_id": seed,
    }


def make_row(
    lengths: list[int], seed: int, *, prompt: int = 0, hashes: list[str] | None = None
) -> dict[str, Any]:
    """A row of documents of random tokens; `prompt` tokens at each start carry no label and no target."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (sum(lengths),), generator=generator).tolist()
    is_target = [position >= prompt for length in lengths for position in range(length)]
    return {
        "input_ids": ids,
        "labels": [token if on else -100 for token, on in zip(ids, is_target, strict=True)],
        "is_target": is_target,
        "document_lengths": lengths,
        "prompt_lengths": [prompt] * len(lengths),
        "document_hashes": hashes or [f"doc-{seed}-{i}" for i in range(len(lengths))],
        "row_id": seed,
    }


def save_model(model: PreTrainedModel, folder: Path) -> Path:
    """The model with a tokenizer that writes token i as `<i>`."""
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(VOCAB)}, unk_token="<0>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<0>", eos_token="<1>", pad_token="<2>"
    ).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == VOCAB
    return folder
