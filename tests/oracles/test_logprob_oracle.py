"""Oracle 1: packed log-probabilities and their gradients equal plain forwards, block by block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ebft_core import packed_logprobs

from .slow_path import Rows, assert_same_gradients, gradients, make_rows, random_tokens, slow_logprobs
from .tiny_models import ARCHITECTURES, tiny_model, with_lora

VOCAB = 37


def _uneven_rows() -> Rows:
    """Unequal lengths, unequal numbers of anchors, irregular steps, one row without any anchor."""
    return make_rows([23, 17, 9, 5], [[3, 4, 9, 18], [1, 11], [6], []], vocab=VOCAB)


def _packed_rows() -> Rows:
    """Rows packed from documents, with anchors right behind and right before the boundaries."""
    documents = [[9, 4, 8], [6, 11], [7]]
    return make_rows(
        [21, 17, 7], [[2, 6, 10, 15, 18], [1, 8, 14], [3]], vocab=VOCAB, documents=documents, seed=3
    )


def _weights(tokens_RANG: Tensor) -> Tensor:
    return torch.randn(tokens_RANG.shape, generator=torch.Generator().manual_seed(7))


def _fast(model: torch.nn.Module, rows: Rows, tokens_RANG: Tensor, temperature: float) -> Tensor:
    extra = {} if rows.document_ids_RL is None else {"document_ids_RL": rows.document_ids_RL}
    return packed_logprobs(
        model, rows.input_ids_RL, rows.anchors_RA, tokens_RANG, temperature=temperature, **extra
    )


@pytest.mark.parametrize("n_samples", [1, 3])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_values(architecture: str, temperature: float, n_samples: int) -> None:
    model = tiny_model(architecture, vocab=VOCAB)
    rows = _uneven_rows()
    tokens = random_tokens(rows, n_samples, 4, vocab=VOCAB)
    with torch.no_grad():
        fast = _fast(model, rows, tokens, temperature)
        slow = slow_logprobs(model, rows, tokens, temperature=temperature)
    assert fast.shape == tokens.shape
    assert slow[slow != 0].std() > 0.5, "the models must be far from uniform or the test is blind"
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)
    assert (fast[rows.anchors_RA < 0] == 0).all()


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox"])
def test_packed_documents(architecture: str) -> None:
    """A block sees only its own document and positions restart with each document."""
    model = tiny_model(architecture, vocab=VOCAB)
    rows = _packed_rows()
    tokens = random_tokens(rows, 2, 3, vocab=VOCAB)
    with torch.no_grad():
        fast = _fast(model, rows, tokens, 0.8)
        slow = slow_logprobs(model, rows, tokens, temperature=0.8)
        unmasked = slow_logprobs(
            model, Rows(rows.input_ids_RL, rows.anchors_RA, rows.lengths), tokens, temperature=0.8
        )
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)
    assert (unmasked - slow).abs().max() > 0.1, "document ids must matter here or the test is blind"


def test_one_token_blocks() -> None:
    """G = 1: every predictor is a document token."""
    model, rows = tiny_model("qwen3", vocab=VOCAB), _uneven_rows()
    tokens = random_tokens(rows, 2, 1, vocab=VOCAB)
    with torch.no_grad():
        fast, slow = _fast(model, rows, tokens, 0.6), slow_logprobs(model, rows, tokens, temperature=0.6)
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)


def test_no_anchor_at_all() -> None:
    model = tiny_model("llama", vocab=VOCAB)
    rows = make_rows([6, 4], [[-1], [-1]], vocab=VOCAB)
    assert torch.equal(
        _fast(model, rows, torch.zeros(2, 1, 2, 3, dtype=torch.long), 1.0), torch.zeros(2, 1, 2, 3)
    )


def test_padding_tokens_do_not_matter() -> None:
    model = tiny_model("llama", vocab=VOCAB)
    rows, other = (make_rows([15, 8], [[4, 9], [2]], vocab=VOCAB, pad=pad) for pad in (0, 11))
    tokens = random_tokens(rows, 2, 3, vocab=VOCAB)
    with torch.no_grad():
        first, second = _fast(model, rows, tokens, 1.0), _fast(model, other, tokens, 1.0)
    torch.testing.assert_close(first, second, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("packed", [False, True], ids=["one_document", "packed_documents"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients(architecture: str, packed: bool) -> None:
    model = tiny_model(architecture, vocab=VOCAB)
    rows = _packed_rows() if packed else _uneven_rows()
    tokens = random_tokens(rows, 2, 3, vocab=VOCAB)
    weights = _weights(tokens)
    fast = gradients(model, (weights * _fast(model, rows, tokens, 0.6)).sum())
    slow = gradients(model, (weights * slow_logprobs(model, rows, tokens, temperature=0.6)).sum())
    assert_same_gradients(fast, slow)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_gradients_of_lora_adapters(architecture: str) -> None:
    model = with_lora(tiny_model(architecture, vocab=VOCAB))
    rows = _uneven_rows()
    tokens = random_tokens(rows, 2, 3, vocab=VOCAB)
    weights = _weights(tokens)
    fast_logp = _fast(model, rows, tokens, 0.6)
    slow_logp = slow_logprobs(model, rows, tokens, temperature=0.6)
    torch.testing.assert_close(fast_logp, slow_logp, atol=1e-5, rtol=1e-5)
    fast = gradients(model, (weights * fast_logp).sum())
    assert any("lora_A" in name for name in fast)
    assert_same_gradients(fast, gradients(model, (weights * slow_logp).sum()))


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_gradient_checkpointing(architecture: str) -> None:
    """Recomputed activations see the same mask and positions."""
    model = tiny_model(architecture, vocab=VOCAB)
    rows = _packed_rows()
    tokens = random_tokens(rows, 2, 3, vocab=VOCAB)
    weights = _weights(tokens)
    slow = gradients(model, (weights * slow_logprobs(model, rows, tokens, temperature=1.0)).sum())
    model.gradient_checkpointing_enable()
    model.train()  # no dropout in these models; checkpointing is active in train mode only
    assert_same_gradients(gradients(model, (weights * _fast(model, rows, tokens, 1.0)).sum()), slow)
