"""What a model writes where it is measured: short blocks at the anchors, or whole completions of prompts.

In both modes the random numbers depend on the seed and the row and on nothing else, and so are the same for
two models. Legend: see `geometry.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ebft_core.blocks import Blocks
from ebft_core.config import RunConfig
from ebft_core.rows import RowBatch, row_uniforms
from ebft_core.samplers.generate import GenerateSampler
from ebft_core.samplers.prompts import request_of, to_blocks
from ebft_core.samplers.strided import rollout

Row = Mapping[str, Any]


def sample_blocks(
    policy: nn.Module,
    rows: Sequence[Row],
    batch: RowBatch,
    config: RunConfig,
    *,
    n_samples: int,
    seed: int,
    pad_token_id: int,
    stop_token_ids: Sequence[int],
) -> Blocks:
    """N blocks at every anchor of `batch`, which was made of `rows`.

    Args:
        n_samples: N, whatever `ebft.n_samples_per_prompt` says.
        stop_token_ids: read in structured mode only: tokens that end a turn.

    Raises:
        ValueError: structured mode without a token that ends a turn.
    """
    if config.ebft.mode == "structured":
        return _completions(policy, rows, batch, config, n_samples, seed, pad_token_id, stop_token_ids)
    return _strided(policy, batch, config, n_samples, seed)


def _strided(policy: nn.Module, batch: RowBatch, config: RunConfig, n_samples: int, seed: int) -> Blocks:
    ebft = config.ebft
    shape = (batch.anchors_RA.shape[1], n_samples, ebft.generate_max_len)
    tokens_RANG = rollout(
        policy,
        batch.input_ids_RL,
        batch.anchors_RA,
        n_samples=n_samples,
        generate_max_len=ebft.generate_max_len,
        temperature=ebft.temperature,
        top_p=ebft.top_p,
        document_ids_RL=batch.document_ids_RL,
        uniforms_RANG=row_uniforms(batch.row_ids_R, seed=seed, step=0, shape=shape),
    )
    return Blocks.full(tokens_RANG, batch.anchors_RA)


def _completions(
    policy: nn.Module,
    rows: Sequence[Row],
    batch: RowBatch,
    config: RunConfig,
    n_samples: int,
    seed: int,
    pad_token_id: int,
    stop_token_ids: Sequence[int],
) -> Blocks:
    """Written in this process: a server, if the run has one, holds one of the two models only."""
    if not stop_token_ids:
        raise ValueError("completions need the ids of the tokens that end a turn")
    ebft = config.ebft.model_copy(update={"n_samples_per_prompt": n_samples})
    config = config.model_copy(update={"ebft": ebft})
    sampler = GenerateSampler(policy, config, stop_token_ids, rows=len(rows))
    groups = sampler.sample([request_of(row, config) for row in rows], seed=seed, version=0)
    return to_blocks(groups, batch.anchors_RA, pad_token_id)
