"""Blocks of different lengths, blocks with equal tokens, blocks that are not needed: each shortcut against
the plain computation of every block by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ebft_core import extract_features
from ebft_core.blocks import Blocks, choose_blocks, first_duplicates
from ebft_core.logprobs import packed_forward
from ebft_core.losses import TokenTerms, clipped_policy_loss, token_losses
from ebft_core.rows import collate_rows

from .slow_path import assert_same_gradients
from .steps import VOCAB, collect, count_batch, lora_policy, make_config, single_rows
from .tiny_models import tiny_model

ANCHORS = torch.tensor([[4, 9, 17], [5, 11, -1]])
GENERATOR_SEED = 3


def _inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(GENERATOR_SEED)
    ids = torch.randint(0, VOCAB, (2, 26), generator=generator)
    return ids, torch.randint(0, VOCAB, (2, 3, 4, 5), generator=generator)


def _blocks(tokens: Tensor) -> Blocks:
    generator = torch.Generator().manual_seed(7)
    length = torch.randint(0, 6, tokens.shape[:3], generator=generator)
    length[0, 0] = torch.tensor([5, 1, 0, 3])
    inside = torch.arange(5) < length[..., None]
    given = torch.rand(tokens.shape, generator=generator) < 0.3  # a user's turn inside the block
    valid = (ANCHORS >= 0)[:, :, None, None]
    return Blocks(tokens, length, inside & ~given & valid)


def _each_block(blocks: Blocks) -> list[tuple[int, int, int, int]]:
    cells = (ANCHORS >= 0).nonzero().tolist()
    return [(r, a, n, int(blocks.length_RAN[r, a, n])) for r, a in cells for n in range(4)]


@pytest.mark.parametrize("max_tokens", [1, 11, None])
def test_logprobs_of_blocks_of_different_lengths(
    max_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if max_tokens is not None:
        monkeypatch.setitem(__import__("ebft_core.forward").forward.TOKENS_PER_FORWARD, "cpu", max_tokens)
    model = tiny_model("llama", vocab=VOCAB, layers=2).eval()
    ids, tokens = _inputs()
    blocks = _blocks(tokens)
    with torch.no_grad():
        output = packed_forward(model, ids, ANCHORS, tokens, temperature=0.7, blocks=blocks)
        for r, a, n, length in _each_block(blocks):
            text = torch.cat([ids[r, : ANCHORS[r, a]], tokens[r, a, n, :length]])[None]
            expected = (model(text).logits[0] / 0.7).log_softmax(-1)
            for s in range(5):
                got = output.logprob_RANG[r, a, n, s].item()
                if not blocks.action_RANG[r, a, n, s]:
                    assert got == 0
                else:
                    place = int(ANCHORS[r, a]) + s - 1
                    assert got == pytest.approx(expected[place, tokens[r, a, n, s]].item(), abs=1e-5)


@pytest.mark.parametrize("method", ["last_token", "mean_pooling", "completion_mean", "concat"])
def test_features_of_blocks_of_different_lengths(method: str) -> None:
    model = tiny_model("llama", vocab=VOCAB, layers=4).eval()
    ids, tokens = _inputs()
    blocks = _blocks(tokens)
    target_length = torch.tensor([[6, 2, 9], [1, 15, 3]])
    written = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.7
    settings = {"feature_layers": [0.5, 1.0], "embed_method": method}
    phi, target = extract_features(
        model, ids, ANCHORS, tokens, **settings, blocks=blocks,
        target_length_RA=target_length, target_action_RL=written, max_tokens=9,
    )  # fmt: skip
    for r, a, n, length in _each_block(blocks):
        start = int(ANCHORS[r, a])
        if length == 0:
            assert phi[r, a, n].abs().max() == 0
            continue
        text = torch.cat([ids[r, :start], tokens[r, a, n, :length]])
        expected = _feature(model, text, start, blocks.action_RANG[r, a, n, :length], method)
        torch.testing.assert_close(phi[r, a, n], expected, atol=1e-5, rtol=0)
        stop = start + int(target_length[r, a])
        expected = _feature(model, ids[r, :stop], start, written[r, start:stop], method)
        torch.testing.assert_close(target[r, a], expected, atol=1e-5, rtol=0)


@torch.no_grad()
def _feature(model: torch.nn.Module, text: Tensor, start: int, action: Tensor, method: str) -> Tensor:
    states = model(text[None], output_hidden_states=True).hidden_states
    parts = []
    for layer in (2, 4):
        span = states[layer][0, start:]
        length = span.shape[0]
        vector = {
            "last_token": lambda s=span: s[-1],
            "mean_pooling": lambda s=span: s.mean(0),
            "completion_mean": lambda s=span: s[action].sum(0) / max(int(action.sum()), 1),
            "concat": lambda s=span, n=length: torch.cat(
                [s[min(int(q * n), n - 1)] for q in (0.25, 0.5, 0.75)]
            ),
        }[method]()
        parts.append(torch.nn.functional.normalize(vector, dim=0))
    return torch.cat(parts) / len(parts) ** 0.5


def test_choice_by_brute_force() -> None:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 2, (2, 3, 4, 2), generator=generator)
    length = torch.randint(1, 3, (2, 3, 4), generator=generator)
    wanted = torch.rand(2, 3, 4, generator=generator) < 0.6
    value = torch.randn(2, 3, 4, generator=generator)
    first = first_duplicates(tokens, length)
    choice = choose_blocks(first, wanted, length)
    texts = [
        [tuple(tokens[r, a, n, : length[r, a, n]].tolist()) for a in range(3) for n in range(4)]
        for r in range(2)
    ]
    for r in range(2):
        flags, flat = wanted[r].flatten().tolist(), value[r].flatten()
        groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for b, text in enumerate(texts[r]):
            groups.setdefault((b // 4, text), []).append(b)
        needed = sorted(members[0] for members in groups.values() if any(flags[b] for b in members))
        needed = sorted(needed, key=lambda b: -len(texts[r][b]))
        assert choice.index_RX[r][choice.valid_RX[r]].tolist() == needed
        sums = choice.sum(value)[r]
        for members in groups.values():
            for b in members:
                assert bool(choice.computed_RB[r, b]) == (members[0] in needed)
            if members[0] in needed:
                place = needed.index(members[0])
                assert all(int(choice.position_RB[r, b]) == place for b in members)
                assert sums[place].item() == pytest.approx(flat[members].sum().item(), abs=1e-6)


def test_merged_and_left_out_blocks_change_no_gradient() -> None:
    """Equal samples are computed once, samples without advantage not at all; the gradient is the sum."""
    config = make_config(kl_coef=0.0, ce_coef=0.0).ebft
    policy = lora_policy()
    batch = collate_rows(single_rows(), make_config(), 0)
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(0, 2, (*batch.anchors_RA.shape, 4, 3), generator=generator)
    advantage = torch.randn(tokens.shape[:3], generator=generator)
    advantage[torch.rand(advantage.shape, generator=generator) < 0.4] = 0
    blocks = Blocks.full(tokens, batch.anchors_RA)
    action = blocks.action_RANG.float()
    merged = TokenTerms(advantage[..., None] * action, action)
    # At ratio 1 the clipped surrogate has the same gradient, and it merges nothing.
    old = packed_forward(
        policy, batch.input_ids_RL, batch.anchors_RA, tokens, temperature=config.temperature
    ).logprob_RANG.detach()
    apart = TokenTerms(merged.weight, action, old_logprob=old)
    counts = count_batch(batch, config)
    _, one = collect(policy, batch, blocks, merged, config, counts)
    _, other = collect(policy, batch, blocks, apart, config, counts, max_tokens=8)
    assert max(g.abs().max().item() for g in one.values()) > 1e-4
    assert_same_gradients(one, other)


def test_clipped_ratio_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    logprob, old, weight = (torch.randn(50, generator=generator) for _ in range(3))
    ratio = torch.exp(logprob.double() - old.double())
    expected = 0.0
    for r, w in zip(ratio.tolist(), weight.double().tolist(), strict=True):
        expected -= min(r * w, min(max(r, 0.8), 1.3) * w)
    got = clipped_policy_loss(weight, logprob, old, (0.2, 0.3), 10)
    assert got.item() == pytest.approx(expected / 10, rel=1e-5)
    terms = TokenTerms(weight, torch.ones(50), old_logprob=old, clip=(0.2, 0.3))
    assert token_losses(logprob, terms, "k3", 10).rl.item() == got.item()
