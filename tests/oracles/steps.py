"""One optimiser step through the package's pure step functions, on small random dataset rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ebft_core.blocks import Blocks
from ebft_core.config import EBFTConfig, RunConfig, parse_config
from ebft_core.losses import TokenTerms
from ebft_core.rows import RowBatch, collate_rows, row_uniforms
from ebft_core.trainers.step import count_actions, count_labels, generate, score, token_terms
from ebft_core.trainers.update import BatchCounts, LossSums, accumulate_gradients

from .tiny_models import tiny_model, with_lora

VOCAB = 29
SETTINGS = dict(
    stride=3,
    context_length=2,
    generate_max_len=3,
    n_samples_per_prompt=4,
    temperature=0.8,
    feature_layers=[0.25, 0.5, 0.75],
    rl_coef=0.9,
    ce_coef=0.3,
    kl_coef=0.2,
    alignment_coef=0.8,
    diversity_coef=1.2,
)


def make_config(**ebft: Any) -> RunConfig:
    return parse_config(
        {
            "model": {"name_or_path": "unused"},
            "data": {"sources": [{"path": "unused.txt"}]},
            "ebft": {**SETTINGS, **ebft},
        }
    )


def dataset_row(
    row_id: int, documents: Sequence[int], prompts: Sequence[int] | None = None
) -> dict[str, Any]:
    """A random dataset row; prompt tokens are not supervised."""
    length = sum(documents)
    ids = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(50 + row_id)).tolist()
    prompts = prompts or [0] * len(documents)
    is_target: list[bool] = []
    for size, prompt in zip(documents, prompts, strict=True):
        is_target += [False] * prompt + [True] * (size - prompt)
    return {
        "row_id": row_id,
        "input_ids": ids,
        "labels": [i if target else -100 for i, target in zip(ids, is_target, strict=True)],
        "is_target": is_target,
        "document_lengths": list(documents),
        "prompt_lengths": list(prompts),
        "document_hashes": [f"{row_id}-{i}" for i in range(len(documents))],
    }


def single_rows() -> list[dict[str, Any]]:
    """One document per row; row 3 is too short for any anchor but has labels."""
    return [
        dataset_row(0, [17]),
        dataset_row(1, [11], [4]),
        dataset_row(2, [23]),
        dataset_row(3, [4]),
        dataset_row(4, [9], [3]),
    ]


def packed_rows() -> list[dict[str, Any]]:
    return [
        dataset_row(0, [9, 8]),
        dataset_row(1, [11], [4]),
        dataset_row(2, [7, 3, 12], [2, 0, 5]),
        dataset_row(3, [4]),
    ]


@dataclass(frozen=True)
class Step:
    """Everything one optimiser step computed."""

    tokens: dict[int, Tensor]
    advantages: dict[int, Tensor]
    loss: float
    parts: tuple[float, float, float]
    gradient: dict[str, Tensor]


def count_batch(batch: RowBatch, config: EBFTConfig) -> BatchCounts:
    return BatchCounts(count_actions(batch, config), count_labels(batch, config))


def update(
    policy: torch.nn.Module,
    batch: RowBatch,
    tokens: Tensor,
    advantage_RAN: Tensor,
    config: EBFTConfig,
    counts: BatchCounts,
    *,
    reference: torch.nn.Module | None = None,
    max_tokens: int | None = 20,
) -> tuple[LossSums, dict[str, Tensor]]:
    """Loss and gradient of one micro-batch with given rollouts and advantages; several parts on purpose."""
    blocks = Blocks.full(tokens, batch.anchors_RA)
    scored = score(reference or policy, batch, blocks, config, "sdpa")
    scored = replace(scored, advantage_RAN=advantage_RAN)
    terms = token_terms(scored, batch, config, attention="sdpa", reference=reference or policy)
    return collect(policy, batch, blocks, terms, config, counts, max_tokens)


def collect(
    policy: torch.nn.Module,
    batch: RowBatch,
    blocks: Blocks,
    terms: TokenTerms,
    config: EBFTConfig,
    counts: BatchCounts,
    max_tokens: int | None = None,
) -> tuple[LossSums, dict[str, Tensor]]:
    policy.zero_grad(set_to_none=True)
    sums = accumulate_gradients(
        policy, batch, blocks, terms, config, counts, attention="sdpa", max_tokens=max_tokens
    )
    gradient = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in policy.named_parameters()
        if p.requires_grad
    }
    policy.zero_grad(set_to_none=True)
    return sums, gradient


def run_step(
    policy: torch.nn.Module,
    rows: list[dict[str, Any]],
    split: Sequence[Sequence[int]],
    config: RunConfig,
    *,
    pad: int = 0,
    frozen: torch.nn.Module | None = None,
) -> Step:
    """One optimiser step whose micro-batches are given by `split` (indices of rows)."""
    batches = [collate_rows([rows[i] for i in part], config, pad) for part in split]
    counts = BatchCounts(0, 0)
    for batch in batches:
        counts = counts + count_batch(batch, config.ebft)
    tokens: dict[int, Tensor] = {}
    advantages: dict[int, Tensor] = {}
    total, parts, gradient = 0.0, np.zeros(3), {}
    for batch in batches:
        shape = (batch.anchors_RA.shape[1], config.ebft.n_samples_per_prompt, config.ebft.generate_max_len)
        uniforms = row_uniforms(batch.row_ids_R, seed=1, step=5, shape=shape)
        blocks = generate(policy, batch, config.ebft, uniforms)
        scored = score(frozen or policy, batch, blocks, config.ebft, "sdpa")
        terms = token_terms(scored, batch, config.ebft, attention="sdpa", reference=frozen or policy)
        sums, gradients = collect(policy, batch, blocks, terms, config.ebft, counts)
        total += sums.loss
        parts += [sums.rl, sums.ce, sums.kl]
        for name, value in gradients.items():
            gradient[name] = gradient.get(name, 0) + value
        for i, row_id in enumerate(batch.row_ids_R.tolist()):
            real = batch.anchors_RA[i] >= 0
            tokens[row_id] = blocks.tokens_RANG[i][real]
            advantages[row_id] = scored.advantage_RAN[i][real]
    return Step(tokens, advantages, total, tuple(parts), gradient)


@cache
def reference_step(packed: bool) -> Step:
    rows = packed_rows() if packed else single_rows()
    return run_step(lora_policy(), rows, [range(len(rows))], make_config())


def lora_policy() -> torch.nn.Module:
    return with_lora(tiny_model("llama", vocab=VOCAB, layers=4))


def recorded(step: Step, batch: RowBatch) -> tuple[Tensor, Tensor]:
    """The step's rollouts and advantages laid out for another batch."""
    shape = (*batch.anchors_RA.shape, SETTINGS["n_samples_per_prompt"], SETTINGS["generate_max_len"])
    tokens = torch.zeros(shape, dtype=torch.long)
    advantage = torch.zeros(shape[:-1])
    for i, row_id in enumerate(batch.row_ids_R.tolist()):
        real = batch.anchors_RA[i] >= 0
        tokens[i][real] = step.tokens[row_id]
        advantage[i][real] = step.advantages[row_id].float()
    return tokens, advantage
