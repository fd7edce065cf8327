"""Oracle 1, second half: one training step equals the slow path, from the features to the gradient of
the whole loss (policy gradient, cross-entropy and KL together)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ebft_core import packed_logprobs
from ebft_core.config import RunConfig
from ebft_core.rows import RowBatch, collate_rows

from .slow_path import Rows, assert_same_gradients, gradients, slow_features, slow_logprobs
from .slow_rewards import expected_rewards, rloo
from .steps import (
    VOCAB,
    count_batch,
    lora_policy,
    make_config,
    packed_rows,
    recorded,
    reference_step,
    run_step,
    single_rows,
    update,
)
from .tiny_models import tiny_model, with_dropout, with_lora


def _as_rows(batch: RowBatch) -> Rows:
    lengths = tuple(batch.input_ids_RL.shape[1] for _ in range(len(batch.row_ids_R)))
    return Rows(batch.input_ids_RL, batch.anchors_RA, lengths, batch.document_ids_RL)


def _slow_cross_entropy(policy: torch.nn.Module, rows: list[dict[str, Any]]) -> Tensor:
    """Mean over supervised tokens, document by document; a document's first token has no predictor."""
    terms = []
    for row in rows:
        start = 0
        for size in row["document_lengths"]:
            ids = torch.tensor(row["input_ids"][start : start + size])
            logp = policy(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
            labels = row["labels"][start : start + size]
            terms += [-logp[i - 1, labels[i]] for i in range(1, size) if labels[i] != -100]
            start += size
    return torch.stack(terms).mean()


def _slow_kl(logprob: Tensor, reference: Tensor, estimator: str) -> Tensor:
    log_ratio = reference - logprob
    if estimator == "k1":
        return -log_ratio
    return log_ratio**2 / 2 if estimator == "k2" else log_ratio.exp() - 1 - log_ratio


def _slow_loss(
    policy: torch.nn.Module,
    base: torch.nn.Module,
    dataset_rows: list[dict[str, Any]],
    batch: RowBatch,
    tokens: Tensor,
    advantage_RAN: Tensor,
    config: RunConfig,
) -> Tensor:
    rows, ebft = _as_rows(batch), config.ebft
    logprob = slow_logprobs(policy, rows, tokens, temperature=ebft.temperature)
    with torch.no_grad():
        reference = slow_logprobs(base, rows, tokens, temperature=ebft.temperature)
    actions = (batch.anchors_RA >= 0).sum() * ebft.n_samples_per_prompt * ebft.generate_max_len
    rl = -(advantage_RAN[..., None] * logprob).sum() / actions
    kl = _slow_kl(logprob, reference, ebft.kl_estimator).sum() / actions
    ce = _slow_cross_entropy(policy, dataset_rows)
    return ebft.rl_coef * rl + ebft.ce_coef * ce + ebft.kl_coef * kl


def _slow_advantages(base: torch.nn.Module, batch: RowBatch, tokens: Tensor, config: RunConfig) -> Tensor:
    ebft, rows = config.ebft, _as_rows(batch)
    phi, target = slow_features(base, rows, tokens, ebft.feature_layers, ebft.embed_method)
    advantage = torch.zeros(tokens.shape[:-1])
    coefs = ebft.alignment_coef, ebft.diversity_coef
    for row, slot, _ in rows.slots():
        group = expected_rewards(phi[row, slot].numpy(), target[row, slot].numpy(), ebft.whitening, *coefs)
        advantage[row, slot] = torch.from_numpy(rloo(group, *coefs)).float()
    return advantage


@pytest.mark.parametrize("whitening", ["feature", "sample", "none"])
@pytest.mark.parametrize("packed", [False, True], ids=["one_document", "packed_documents"])
def test_whole_step_of_a_lora_policy(packed: bool, whitening: str) -> None:
    """Rollout → features → rewards → advantages → loss → gradient, each from its formula."""
    config = make_config(whitening=whitening, embed_method="mean_pooling")
    dataset_rows = packed_rows() if packed else single_rows()
    policy, base = lora_policy(), tiny_model("llama", vocab=VOCAB, layers=4)
    step = run_step(policy, dataset_rows, [range(len(dataset_rows))], config)
    batch = collate_rows(dataset_rows, config, 0)
    tokens, advantage = recorded(step, batch)
    slow_advantage = _slow_advantages(base, batch, tokens, config)
    torch.testing.assert_close(advantage, slow_advantage, atol=2e-4, rtol=0)
    loss = _slow_loss(policy, base, dataset_rows, batch, tokens, slow_advantage, config)
    assert step.loss == pytest.approx(loss.item(), rel=1e-4)
    assert_same_gradients(step.gradient, gradients(policy, loss))


@pytest.mark.parametrize("kl_estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("architecture", ["gpt2", "qwen3"])
def test_whole_loss_of_a_full_policy(architecture: str, kl_estimator: str) -> None:
    """Every weight trains; the reference is a frozen copy. Some groups have no advantage at all: they
    still count for the KL penalty and in the denominators."""
    config = make_config(kl_estimator=kl_estimator)
    dataset_rows = packed_rows()
    policy = tiny_model(architecture, vocab=VOCAB, layers=2, seed=0)
    frozen = tiny_model(architecture, vocab=VOCAB, layers=2, seed=0)
    noise = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in frozen.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=0.05)
    batch = collate_rows(dataset_rows, config, 0)
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, VOCAB, (*batch.anchors_RA.shape, 4, 3), generator=generator)
    advantage = torch.randn(tokens.shape[:-1], generator=generator)
    advantage[:, 1] = 0
    advantage[0, 0, 2] = 0
    advantage[batch.anchors_RA < 0] = 0
    counts = count_batch(batch, config.ebft)
    sums, gradient = update(policy, batch, tokens, advantage, config.ebft, counts, reference=frozen)
    loss = _slow_loss(policy, frozen, dataset_rows, batch, tokens, advantage, config)
    assert sums.loss == pytest.approx(loss.item(), rel=1e-4)
    assert_same_gradients(gradient, gradients(policy, loss))


@pytest.mark.parametrize(
    "coefs",
    [
        dict(rl_coef=1.0, ce_coef=0.0, kl_coef=0.0),
        dict(rl_coef=0.0, ce_coef=1.0, kl_coef=0.0),
        dict(rl_coef=1.0, ce_coef=0.03, kl_coef=0.0),
    ],
)
def test_each_part_alone(coefs: dict[str, float]) -> None:
    """Shortcuts taken when a coefficient is zero must not change the rest."""
    config = make_config(**coefs)
    dataset_rows = single_rows()
    policy, base = lora_policy(), tiny_model("llama", vocab=VOCAB, layers=4)
    whole = reference_step(packed=False)
    batch = collate_rows(dataset_rows, config, 0)
    tokens, advantage = recorded(whole, batch)
    advantage[2, 1:3] = 0
    counts = count_batch(batch, config.ebft)
    sums, gradient = update(policy, batch, tokens, advantage, config.ebft, counts)
    loss = _slow_loss(policy, base, dataset_rows, batch, tokens, advantage, config)
    assert sums.loss == pytest.approx(loss.item(), rel=1e-4)
    assert_same_gradients(gradient, gradients(policy, loss))


def test_frozen_reference_runs_without_dropout() -> None:
    """The KL reference of a LoRA policy in train mode is the frozen base, not a random thinning of it."""
    config = make_config(ce_coef=0.0, kl_coef=1.0, kl_estimator="k1")
    base = tiny_model("gpt2", vocab=VOCAB, layers=2)
    policy = with_lora(with_dropout(tiny_model("gpt2", vocab=VOCAB, layers=2), 0.3)).train()
    batch = collate_rows(single_rows(), config, 0)
    shape = (*batch.anchors_RA.shape, 4, 3)
    tokens = torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(1))
    counts = count_batch(batch, config.ebft)
    arguments = (batch.input_ids_RL, batch.anchors_RA, tokens)
    with torch.no_grad():
        torch.manual_seed(0)  # the same dropout in both forwards of the policy
        logprob = packed_logprobs(policy, *arguments, temperature=config.ebft.temperature)
        reference = slow_logprobs(base, _as_rows(batch), tokens, temperature=config.ebft.temperature)
    torch.manual_seed(0)
    zeros = torch.zeros(shape[:-1])
    sums, _ = update(policy, batch, tokens, zeros, config.ebft, counts, max_tokens=None)
    expected = (logprob - reference).sum() / counts.actions
    assert sums.kl == pytest.approx(expected.item(), rel=1e-4)
