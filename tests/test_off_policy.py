"""Importance ratios and masks against plain forwards in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ebft_core.blocks import Blocks
from ebft_core.losses import TokenTerms
from ebft_core.rows import collate_rows
from ebft_core.trainers.off_policy import mean_log_ratio, off_policy_terms
from tests.structured_fixtures import (
    VOCAB,
    config_of,
    rows,
)
from tests.trainer_fixtures import tiny_llama


def _off_policy(**rollout: Any) -> tuple[TokenTerms, float, Blocks, Tensor]:
    config = config_of(rollout={"use_vllm": True, **rollout}, lora={"r": 4})
    model = tiny_llama(VOCAB).eval()
    batch = collate_rows(rows(2), config, 0)
    tokens = torch.randint(2, VOCAB, (2, 1, 4, 5), generator=torch.Generator().manual_seed(0))
    length = torch.tensor([[[5, 3, 1, 4]], [[2, 5, 5, 1]]])
    action = torch.arange(5) < length[..., None]
    reported = -3.0 * torch.rand(tokens.shape, generator=torch.Generator().manual_seed(1)) * action
    truncated = torch.zeros_like(length, dtype=torch.bool)
    truncated[0, 0, 1] = True
    blocks = Blocks(tokens, length, action, reported, truncated)
    terms = TokenTerms(action.float(), action.float())
    changed, masked = off_policy_terms(
        terms, model, batch, blocks, config.ebft, config.rollout, attention="sdpa"
    )
    expected = torch.zeros(tokens.shape, dtype=torch.float64)
    for r in range(2):
        prompt = rows(2)[r]["input_ids"][: rows(2)[r]["prompt_lengths"][0]]
        for n in range(4):
            ids = torch.tensor([prompt + tokens[r, 0, n].tolist()])
            with torch.no_grad():
                logp = (model(ids).logits[0].double() / config.ebft.temperature).log_softmax(-1)
            for s in range(int(length[r, 0, n])):
                expected[r, 0, n, s] = logp[len(prompt) + s - 1, ids[0, len(prompt) + s]]
    return changed, masked, blocks, expected


def test_importance_ratios_and_masks_in_float64() -> None:
    terms, masked, blocks, expected = _off_policy(off_policy_mask_threshold=0.5, num_iterations=2)
    assert blocks.sampler_logprob_RANG is not None
    assert terms.old_logprob is not None
    torch.testing.assert_close(terms.old_logprob.double(), expected, atol=1e-5, rtol=0)
    difference = (blocks.sampler_logprob_RANG.double() - expected) * blocks.action_RANG
    kl = difference.sum(-1) / blocks.length_RAN
    torch.testing.assert_close(mean_log_ratio(blocks, expected.float()).double(), kl, atol=1e-5, rtol=0)
    kept = (kl <= 0.5)[..., None] & blocks.action_RANG
    assert 0 < int(kept.sum()) < int(blocks.action_RANG.sum())
    assert torch.equal(terms.weight != 0, kept)
    assert masked == pytest.approx(1 - int(kept.sum()) / int(blocks.action_RANG.sum()))


def test_truncated_completions_can_be_masked() -> None:
    config = config_of(ebft={"mask_truncated_completions": True}, rollout={"use_vllm": True}, lora={"r": 4})
    _, _, blocks, _ = _off_policy()
    action = blocks.action_RANG.float()
    terms, masked = off_policy_terms(
        TokenTerms(action, action), tiny_llama(VOCAB), collate_rows(rows(2), config, 0), blocks,
        config.ebft, config.rollout, attention="sdpa",
    )  # fmt: skip
    assert terms.weight[0, 0, 1].abs().sum() == 0
    assert terms.weight[0, 0, 0].abs().sum() == 5
    assert masked == pytest.approx(3 / int(action.sum()))
