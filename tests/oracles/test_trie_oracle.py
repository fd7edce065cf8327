"""Shared prefixes change what is computed, never the result."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ebft_core import extract_features, rollout
from ebft_core.attention import shared
from ebft_core.attention.shared import trie_of
from ebft_core.blocks import Blocks
from ebft_core.losses import TokenTerms
from ebft_core.rows import RowBatch, collate_rows
from ebft_core.trainers.update import accumulate_gradients

from .slow_path import assert_same_gradients
from .steps import count_batch, lora_policy, make_config, packed_rows, single_rows


def _batch(packed: bool) -> RowBatch:
    return collate_rows(packed_rows() if packed else single_rows(), make_config(), 0)


def _tokens(batch: RowBatch, choices: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, choices, (*batch.anchors_RA.shape, 4, 3), generator=generator)


def test_trie_by_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MIN_SAVING", 0.0)
    generator = torch.Generator().manual_seed(0)
    group = torch.tensor([[4, 4, 4, 9, 9], [3, 3, -1, -1, -1]])
    tokens = torch.randint(0, 2, (2, 5, 4), generator=generator)
    trie = trie_of(group, tokens)
    assert trie is not None
    for r in range(2):
        keys = [
            (int(group[r, x]), tuple(tokens[r, x, : s + 1].tolist()) if group[r, x] >= 0 else s)
            for x in range(5)
            for s in range(4)
        ]
        nodes = trie.node_RT[r].tolist()
        by_key: dict[object, int] = {}
        for key, node in zip(keys, nodes, strict=True):
            assert by_key.setdefault(key, node) == node
        assert len(set(by_key.values())) == len(by_key)
        for key, node in by_key.items():
            assert keys[int(trie.first_RU[r, node])] == key


@pytest.mark.parametrize("packed", [False, True], ids=["one_document", "packed_documents"])
def test_gradient_and_tokens_fed(packed: bool) -> None:
    config = make_config(kl_coef=0.0).ebft
    policy, batch = lora_policy(), _batch(packed)
    tokens = _tokens(batch, 2)
    blocks = Blocks.full(tokens, batch.anchors_RA)
    weight = torch.randn(tokens.shape[:3], generator=torch.Generator().manual_seed(1))[..., None]
    terms = TokenTerms(weight * blocks.action_RANG, blocks.action_RANG.float())
    results = {}
    for share in (False, True):
        policy.zero_grad()
        sums = accumulate_gradients(
            policy, batch, blocks, terms, config, count_batch(batch, config),
            attention="sdpa", share_prefixes=share,
        )  # fmt: skip
        results[share] = sums, {n: p.grad.clone() for n, p in policy.named_parameters() if p.requires_grad}
    assert results[True][0].tokens_fed < 0.9 * results[False][0].tokens_fed
    assert results[True][0].rl == pytest.approx(results[False][0].rl, rel=1e-5)
    assert results[True][0].entropy == pytest.approx(results[False][0].entropy, rel=1e-5)
    assert_same_gradients(results[True][1], results[False][1])


@pytest.mark.parametrize("packed", [False, True], ids=["one_document", "packed_documents"])
def test_features(packed: bool) -> None:
    policy, batch = lora_policy(), _batch(packed)
    tokens = _tokens(batch, 2)
    one, other = (
        extract_features(
            policy,
            batch.input_ids_RL,
            batch.anchors_RA,
            tokens,
            feature_layers=[0.5, 1.0],
            embed_method="mean_pooling",
            document_ids_RL=batch.document_ids_RL,
            share_prefixes=share,
        )
        for share in (False, True)
    )
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a low temperature most samples begin alike; they are fed once and come out the same."""
    policy, batch = lora_policy(), _batch(packed=False)
    for parameter in policy.parameters():
        parameter.data *= 3  # peaked distributions
    shape = (*batch.anchors_RA.shape, 4, 5)
    uniforms = torch.rand(shape, generator=torch.Generator().manual_seed(2))
    fed: list[int] = []
    policy.get_input_embeddings().register_forward_hook(lambda _m, args, _o: fed.append(args[0].numel()))

    def roll(share: bool) -> tuple[Tensor, int]:
        fed.clear()
        tokens = rollout(
            policy, batch.input_ids_RL, batch.anchors_RA, n_samples=4, generate_max_len=5,
            temperature=0.5, uniforms_RANG=uniforms, share_prefixes=share,
        )  # fmt: skip
        return tokens, sum(fed)

    (apart, all_fed), (together, few_fed) = roll(False), roll(True)
    assert torch.equal(apart, together)
    assert few_fed < 0.95 * all_fed
