"""Policies with adapters whose truth is computed by the library, for the tests of weight syncs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.oracles.tiny_models import with_lora

CANARY = [5, 80, 200, 7, 7, 31, 0, 99]


def make_policy(model: Path, *, seed: int = 0, rank: int = 4) -> Any:
    return with_lora(AutoModelForCausalLM.from_pretrained(model), seed=seed, rank=rank)


def train(policy: torch.nn.Module, seed: int) -> None:
    """Change the adapters as an optimiser step would, only more."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


def truth(policy: Any, text: list[int] = CANARY) -> list[float]:
    """The policy's log-probabilities of a text by the library's own forward pass."""
    tokens = torch.tensor([text])
    with torch.no_grad():
        logprobs = policy(input_ids=tokens).logits[0, :-1].double().log_softmax(-1)
    return logprobs.gather(-1, tokens[0, 1:, None])[:, 0].tolist()
