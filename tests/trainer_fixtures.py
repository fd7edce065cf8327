"""Tiny models, rows and trainers shared by the trainer's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ebft_core.config import RunConfig, parse_config
from ebft_core.evaluation import training_evaluator
from ebft_core.events import EventWriter
from ebft_core.models import freeze_copy
from ebft_core.stop import StopSignal
from ebft_core.trainers.arguments import count_steps, training_arguments
from ebft_core.trainers.ebft import EBFTTrainer

CPU = torch.device("cpu")


def tiny_llama(vocab_size: int = 40) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.3,
        )
    )


def make_config(**overrides: Any) -> RunConfig:
    """A run configuration with `section={...}` overrides."""
    mapping: dict[str, Any] = {
        "model": {"name_or_path": "unused"},
        "data": {"sources": [{"path": "unused.txt"}], "sequence_length": 64},
        "ebft": {"stride": 4, "context_length": 4, "generate_max_len": 4, "temperature": 0.8},
        "trainer": {
            "learning_rate": 1e-2,
            "max_steps": 4,
            "save_every": 2,
            "precision": "float32",
            "device": "cpu",
        },
        "lora": None,
    }
    for section, values in overrides.items():
        current = mapping.get(section)
        mapping[section] = (
            {**current, **values} if isinstance(current, dict) and values is not None else values
        )
    return parse_config(mapping, origin="test")


def make_rows(count: int = 10, *, seed: int = 0, vocab_size: int = 40) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for row_id in range(count):
        length = int(torch.randint(16, 32, (1,), generator=generator))
        ids = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
        rows.append(
            {
                "row_id": row_id,
                "input_ids": ids,
                "labels": ids,
                "is_target": [True] * length,
                "document_lengths": [length],
                "prompt_lengths": [0],
            }
        )
    return rows


def make_trainer(
    folder: Path,
    config: RunConfig,
    *,
    policy: torch.nn.Module | None = None,
    rows: list[dict[str, Any]] | None = None,
    events: EventWriter | None = None,
    stop: StopSignal | None = None,
    heldout: list[dict[str, Any]] | None = None,
) -> EBFTTrainer:
    policy = tiny_llama() if policy is None else policy
    feature_model = None if config.lora is not None else freeze_copy(policy, torch.float32, CPU)
    rows = make_rows() if rows is None else rows
    max_steps = count_steps(config.trainer, len(rows))
    arguments = training_arguments(
        config.trainer, folder, max_steps=max_steps, device=CPU, precision=torch.float32
    )
    return EBFTTrainer(
        policy,
        config,
        arguments,
        rows,
        pad_token_id=0,
        attention="sdpa",
        feature_model=feature_model,
        evaluator=heldout
        and training_evaluator(heldout, config, feature_model=feature_model, pad_token_id=0),
        events=events,
        stop=stop,
    )


def weights(trainer: EBFTTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
