"""Oracle 2: greedy rollouts equal the library's `generate`; sampled ones match exact probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from ebft_core import rollout
from ebft_core.samplers import strided

from .slow_path import Rows, block_logits, make_rows
from .tiny_models import ARCHITECTURES, tiny_model, with_dropout, with_lora

VOCAB = 37
SMALL = 11


def _uneven_rows() -> Rows:
    return make_rows([23, 17, 9, 5], [[3, 4, 9, 18], [1, 11], [6], []], vocab=VOCAB)


def _packed_rows() -> Rows:
    documents = [[9, 4, 8], [6, 11], [7]]
    return make_rows(
        [21, 17, 7], [[2, 6, 10, 15, 18], [1, 8, 14], [3]], vocab=VOCAB, documents=documents, seed=3
    )


def _roll(model: torch.nn.Module, rows: Rows, n_samples: int, length: int, **kwargs: Any) -> Tensor:
    if rows.document_ids_RL is not None:
        kwargs["document_ids_RL"] = rows.document_ids_RL
    return rollout(
        model, rows.input_ids_RL, rows.anchors_RA, n_samples=n_samples, generate_max_len=length, **kwargs
    )


def _library_greedy(model: Any, rows: Rows, length: int) -> dict[tuple[int, int], Tensor]:
    out = {}
    for row, slot, anchor in rows.slots():
        prefix = rows.prefix(row, anchor)[None]
        mask = torch.ones_like(prefix)
        ids = model.generate(
            input_ids=prefix, attention_mask=mask, do_sample=False, max_new_tokens=length, pad_token_id=0
        )
        out[row, slot] = ids[0, prefix.shape[1] :]
    return out


def _assert_greedy(model: Any, rows: Rows, length: int, n_samples: int) -> None:
    tokens = _roll(model, rows, n_samples, length, temperature=0.0)
    assert tokens.shape == (*rows.anchors_RA.shape, n_samples, length)
    assert tokens.dtype == torch.int64
    assert (tokens[rows.anchors_RA < 0] == 0).all()
    expected = _library_greedy(model, rows, length)
    assert len({tuple(t.tolist()) for t in expected.values()}) > 1, "all continuations equal: blind test"
    for (row, slot), block_G in expected.items():
        for sample in range(n_samples):
            assert tokens[row, slot, sample].tolist() == block_G.tolist(), f"row {row}, slot {slot}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy(architecture: str) -> None:
    _assert_greedy(tiny_model(architecture, vocab=VOCAB, layers=2), _uneven_rows(), length=6, n_samples=2)


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_greedy_in_packed_documents(architecture: str) -> None:
    _assert_greedy(tiny_model(architecture, vocab=VOCAB, layers=2), _packed_rows(), length=4, n_samples=1)


def test_greedy_with_lora_uses_the_adapters() -> None:
    base = tiny_model("llama", vocab=VOCAB, layers=2)
    plain = _roll(base, _uneven_rows(), 1, 6, temperature=0.0)
    model = with_lora(base)
    _assert_greedy(model, _uneven_rows(), length=6, n_samples=1)
    assert not torch.equal(_roll(model, _uneven_rows(), 1, 6, temperature=0.0), plain)


def test_one_token_blocks() -> None:
    _assert_greedy(tiny_model("mistral", vocab=VOCAB, layers=2), _uneven_rows(), length=1, n_samples=2)


def _pair_probabilities(model: torch.nn.Module, prefix: Tensor, temperature: float) -> np.ndarray:
    """P(first token, second token | prefix), by one plain forward per first token."""
    pairs = np.zeros((SMALL, SMALL))
    for first in range(SMALL):
        with torch.no_grad():
            logits = block_logits(model, prefix, torch.tensor([first, 0])).double() / temperature
        p = logits.softmax(-1).numpy()
        pairs[first] = p[0, first] * p[1]
    return pairs


def _chi_square_p(counts: np.ndarray, probabilities: np.ndarray, minimum: float = 5.0) -> float:
    """Cells expected less than `minimum` times are merged into one."""
    expected = probabilities.ravel() / probabilities.sum() * counts.sum()
    rare = expected < minimum
    observed = np.append(counts.ravel()[~rare], counts.ravel()[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] == 0:
        assert observed[-1] == 0
        observed, expected = observed[:-1], expected[:-1]
    return float(stats.chisquare(observed, expected).pvalue)


def _repeat_row(rows: Rows, times: int) -> Rows:
    return Rows(
        rows.input_ids_RL.repeat(times, 1), rows.anchors_RA.repeat(times, 1), rows.lengths * times, None
    )


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_sampled_pairs_match_exact_probabilities(architecture: str) -> None:
    model = tiny_model(architecture, vocab=SMALL, layers=2, seed=4)
    rows = make_rows([14], [[3, 8]], vocab=SMALL)
    generator = torch.Generator().manual_seed(20)
    tokens = _roll(model, _repeat_row(rows, 64), 32, 3, temperature=0.7, generator=generator)
    for slot, anchor in enumerate(rows.anchors_RA[0].tolist()):
        exact = _pair_probabilities(model, rows.prefix(0, anchor), 0.7)
        pairs = tokens[:, slot, :, :2].reshape(-1, 2).numpy()
        counts = np.zeros((SMALL, SMALL))
        np.add.at(counts, (pairs[:, 0], pairs[:, 1]), 1)
        assert _chi_square_p(counts, exact) > 1e-4
        # Power: the same sample must reject a model that forgets the temperature.
        assert _chi_square_p(counts, _pair_probabilities(model, rows.prefix(0, anchor), 1.0)) < 1e-6


def _nucleus(probabilities: np.ndarray, top_p: float) -> np.ndarray:
    """The smallest set of most probable tokens that holds at least `top_p`, renormalised."""
    order = np.argsort(-probabilities)
    size = int(np.searchsorted(np.cumsum(probabilities[order]), top_p)) + 1
    kept = np.zeros_like(probabilities)
    kept[order[:size]] = probabilities[order[:size]]
    return kept / kept.sum()


def _grid_uniforms(rows: Rows, n_samples: int, length: int) -> Tensor:
    """u of the first token on an even grid over all rows and samples; 0.5 for later tokens."""
    n_rows, n_slots = rows.anchors_RA.shape
    grid = (torch.arange(n_rows * n_samples, dtype=torch.float64) + 0.5) / (n_rows * n_samples)
    uniforms = torch.full((n_rows, n_slots, n_samples, length), 0.5, dtype=torch.float64)
    uniforms[..., 0] = grid.view(n_rows, 1, n_samples)
    return uniforms.float()


@pytest.mark.parametrize("top_p", [1.0, 0.8, 0.5, 0.05])
def test_inverse_cdf_gives_exact_frequencies_and_support(top_p: float) -> None:
    """On an even grid of M uniforms each token is drawn M·p times, up to rounding, and no other token is."""
    model = tiny_model("qwen2", vocab=SMALL, layers=2, seed=5)
    base = make_rows([12], [[2, 5, 9]], vocab=SMALL)
    rows = _repeat_row(base, 20)
    tokens = _roll(
        model, rows, 50, 2, temperature=0.9, top_p=top_p, uniforms_RANG=_grid_uniforms(rows, 50, 2)
    )
    for slot, anchor in enumerate(base.anchors_RA[0].tolist()):
        with torch.no_grad():
            logits = block_logits(model, base.prefix(0, anchor), torch.tensor([0])).double() / 0.9
        exact = logits.softmax(-1)[0].numpy()
        exact = exact if top_p == 1.0 else _nucleus(exact, top_p)
        counts = np.bincount(tokens[:, slot, :, 0].flatten().numpy(), minlength=SMALL)
        assert np.abs(counts - 1000 * exact).max() <= 1.01, (counts, 1000 * exact)
        assert (counts[exact == 0] == 0).all()


@pytest.mark.parametrize("vocabulary", [127, 128, 129, 300, 1024])
@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_tokens_found_by_bins_are_those_of_the_running_sum(vocabulary: int, top_p: float) -> None:
    """Against one running sum in float64; only numbers within rounding of a border may go to a neighbour."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 4 * torch.randn(6, vocabulary, generator=generator)
    logits[0, :-1] = -200.0  # all mass on the last token
    logits[1, 1:] = -200.0
    logits[2, :60] = logits[2, 100:] = -float("inf")  # whole bins without mass
    uniforms = (torch.arange(4000) / 4000).expand(6, -1).contiguous()
    uniforms[:, -1] = 1 - 2**-24
    probs = (logits.double() / 0.8).softmax(dim=-1)
    if top_p < 1:
        probs = torch.from_numpy(np.stack([_nucleus(row, top_p) for row in probs.numpy()]))
    tokens, totals = strided._inverse_cdf(logits.clone(), uniforms, 0.8, top_p)
    cdf = probs.cumsum(dim=-1)
    low, high = cdf - probs, cdf
    target = uniforms.double() * cdf[:, -1:]
    assert (probs.gather(1, tokens) > 0).all()
    assert (low.gather(1, tokens) - 1e-5 <= target).all()
    assert (target <= high.gather(1, tokens) + 1e-5).all()
    exact = torch.searchsorted(cdf, target, right=True).clamp(max=vocabulary - 1)
    assert (tokens == exact).float().mean() > 0.99
    assert totals.shape == (6, 1)


def test_top_p_holds_for_later_tokens() -> None:
    """Second tokens stay in the nucleus of their own distribution."""
    model = tiny_model("llama", vocab=SMALL, layers=2, seed=6)
    rows = _repeat_row(make_rows([10], [[4]], vocab=SMALL), 16)
    generator = torch.Generator().manual_seed(3)
    tokens = _roll(model, rows, 16, 2, temperature=1.0, top_p=0.6, generator=generator)
    prefix = rows.prefix(0, 4)
    left_out = 0
    for first in tokens[..., 0].unique().tolist():
        with torch.no_grad():
            logits = block_logits(model, prefix, torch.tensor([first, 0])).double()
        allowed = _nucleus(logits.softmax(-1)[1].numpy(), 0.6) > 0
        left_out += int((~allowed).sum())
        seconds = tokens[tokens[..., 0] == first][:, 1].unique().tolist()
        assert all(allowed[second] for second in seconds)
    assert left_out > 0


def _uniforms(rows: Rows, n_samples: int, length: int, seed: int = 9) -> Tensor:
    shape = (*rows.anchors_RA.shape, n_samples, length)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_batching_and_row_order_do_not_matter(architecture: str) -> None:
    model = tiny_model(architecture, vocab=VOCAB, layers=2)
    rows = _packed_rows()
    uniforms = _uniforms(rows, 2, 4)
    whole = _roll(model, rows, 2, 4, temperature=0.8, uniforms_RANG=uniforms)
    assert rows.document_ids_RL is not None
    for order in ([2, 0, 1], [1], [0], [2]):
        part = Rows(
            rows.input_ids_RL[order],
            rows.anchors_RA[order],
            tuple(rows.lengths[i] for i in order),
            rows.document_ids_RL[order],
        )
        assert torch.equal(
            _roll(model, part, 2, 4, temperature=0.8, uniforms_RANG=uniforms[order]), whole[order]
        )


def test_padding_does_not_matter() -> None:
    model, rows = tiny_model("llama", vocab=VOCAB, layers=2), _uneven_rows()
    uniforms = _uniforms(rows, 2, 4)
    wide = Rows(
        torch.nn.functional.pad(rows.input_ids_RL, (0, 7), value=5),
        torch.nn.functional.pad(rows.anchors_RA, (0, 2), value=-1),
        rows.lengths,
    )
    wide_uniforms = torch.nn.functional.pad(uniforms, (0, 0, 0, 0, 0, 2), value=0.3)
    narrow = _roll(model, rows, 2, 4, temperature=0.8, uniforms_RANG=uniforms)
    assert torch.equal(_roll(model, wide, 2, 4, temperature=0.8, uniforms_RANG=wide_uniforms)[:, :4], narrow)


def test_same_generator_seed_same_tokens() -> None:
    model, rows = tiny_model("llama", vocab=VOCAB, layers=2), _uneven_rows()
    draws = [
        _roll(model, rows, 3, 4, temperature=1.0, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    real = draws[0][rows.anchors_RA >= 0]
    assert (real[:, 0] != real[:, 1]).any(), "samples of one anchor must be drawn independently"


def test_rollouts_run_without_dropout() -> None:
    """A policy in train mode rolls out like in eval mode and stays in train mode."""
    model = with_dropout(tiny_model("gpt2", vocab=VOCAB, layers=2), 0.5)
    rows = _uneven_rows()
    quiet = _roll(model, rows, 1, 5, temperature=0.0)
    model.train()
    assert torch.equal(_roll(model, rows, 1, 5, temperature=0.0), quiet)
    assert model.training


def test_no_anchor_slots() -> None:
    """A micro-batch of too-short rows only: A = 0, nothing to generate, no error."""
    model = tiny_model("llama", vocab=VOCAB, layers=2)
    rows = Rows(torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 0, dtype=torch.long), (3, 3))
    assert _roll(model, rows, 2, 4, temperature=1.0).shape == (2, 0, 2, 4)
