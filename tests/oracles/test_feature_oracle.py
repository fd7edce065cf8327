"""Features equal the library's `output_hidden_states` of a plain forward of `document[:anchor] + block`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ebft_core import extract_features

from .slow_path import Rows, make_rows, random_tokens, slow_features
from .tiny_models import ARCHITECTURES, tiny_model, with_dropout, with_lora

VOCAB = 37
DEPTHS = [0.25, 0.5, 0.75]
METHODS = ("last_token", "mean_pooling", "completion_mean", "concat")


def _uneven_rows() -> Rows:
    return make_rows([23, 17, 12, 5], [[3, 4, 9, 17], [1, 11], [6], []], vocab=VOCAB)


def _packed_rows() -> Rows:
    documents = [[9, 4, 8], [6, 11], [7]]
    return make_rows(
        [21, 17, 7], [[2, 5, 10, 15, 18], [1, 8, 14], [3]], vocab=VOCAB, documents=documents, seed=3
    )


def _fast(model: Any, rows: Rows, tokens: Tensor, depths: list[float], method: str) -> tuple[Tensor, Tensor]:
    extra = {} if rows.document_ids_RL is None else {"document_ids_RL": rows.document_ids_RL}
    return extract_features(
        model,
        rows.input_ids_RL,
        rows.anchors_RA,
        tokens,
        feature_layers=depths,
        embed_method=method,
        **extra,
    )


def _assert_features(
    model: Any, slow_model: Any, rows: Rows, length: int, depths: list[float], method: str
) -> None:
    tokens = random_tokens(rows, 2, length, vocab=VOCAB)
    fast = _fast(model, rows, tokens, depths, method)
    slow = slow_features(slow_model, rows, tokens, depths, method)
    for name, a, b in zip(("phi", "target"), fast, slow, strict=True):
        assert not a.requires_grad
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    norms = fast[0][rows.anchors_RA >= 0].norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms), atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures(architecture: str) -> None:
    model = tiny_model(architecture, vocab=VOCAB, layers=4)
    _assert_features(model, model, _uneven_rows(), 5, DEPTHS, "last_token")


@pytest.mark.parametrize("length", [1, 2, 3, 6])
@pytest.mark.parametrize("method", METHODS)
def test_pooling(method: str, length: int) -> None:
    model = tiny_model("llama", vocab=VOCAB, layers=4)
    _assert_features(model, model, _uneven_rows(), length, DEPTHS, method)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox"])
@pytest.mark.parametrize(
    ("layers", "depths"),
    [
        (3, [0.25, 0.5, 0.75]),  # floor(0.75) = 0 is raised to 1; 1 appears twice
        (2, [0.1, 0.5, 0.99]),  # all three are layer 1
        (4, [1.0]),  # the last entry of `hidden_states` stands behind the final norm
        (4, [0.75, 0.25, 1.0]),  # in the order given
    ],
)
def test_layers(layers: int, depths: list[float], architecture: str) -> None:
    model = tiny_model(architecture, vocab=VOCAB, layers=layers)
    _assert_features(model, model, _uneven_rows(), 3, depths, "last_token")


@pytest.mark.parametrize("method", ["last_token", "concat"])
@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])
def test_packed_documents(architecture: str, method: str) -> None:
    model = tiny_model(architecture, vocab=VOCAB, layers=4)
    _assert_features(model, model, _packed_rows(), 3, DEPTHS, method)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_peft_model_is_its_base(architecture: str) -> None:
    """φ is the base model: adapters off during features, on again afterwards."""
    base = tiny_model(architecture, vocab=VOCAB, layers=4)
    model = with_lora(tiny_model(architecture, vocab=VOCAB, layers=4))
    rows = _uneven_rows()
    ids = rows.input_ids_RL[:1]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        assert (before - base(input_ids=ids).logits).abs().max() > 0.1
    _assert_features(model, base, rows, 5, DEPTHS, "last_token")
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, before)


def test_dropout_of_a_training_policy_does_not_reach_its_features() -> None:
    """A LoRA policy in train mode gives the frozen network's features and stays in train mode."""
    model = with_lora(with_dropout(tiny_model("gpt2", vocab=VOCAB, layers=4), 0.5))
    rows = _uneven_rows()
    tokens = random_tokens(rows, 2, 4, vocab=VOCAB)
    quiet = _fast(model, rows, tokens, DEPTHS, "last_token")
    model.train()
    ids = rows.input_ids_RL[:1]
    assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits), "dropout is not active"
    loud = _fast(model, rows, tokens, DEPTHS, "last_token")
    assert model.training
    assert all(torch.equal(a, b) for a, b in zip(quiet, loud, strict=True))
    assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_equal_tokens_give_bit_equal_features(method: str, dtype: torch.dtype) -> None:
    model = tiny_model("llama", vocab=VOCAB, layers=4, dtype=dtype)
    rows = _uneven_rows()
    tokens = random_tokens(rows, 4, 5, vocab=VOCAB)
    tokens[:, :, 3] = tokens[:, :, 0]
    tokens[:, 0, 2] = tokens[:, 0, 1]
    phi, _ = _fast(model, rows, tokens, DEPTHS, method)
    assert torch.equal(phi[:, :, 3], phi[:, :, 0])
    assert torch.equal(phi[:, 0, 2], phi[:, 0, 1])
    real = rows.anchors_RA[:, 1] >= 0
    assert (phi[real, 1, 2] != phi[real, 1, 1]).any()


def test_block_that_repeats_the_document_is_the_target() -> None:
    """A sample equal to the ground truth has the ground truth's feature."""
    model = tiny_model("qwen3", vocab=VOCAB, layers=4)
    rows = _uneven_rows()
    tokens = random_tokens(rows, 2, 5, vocab=VOCAB)
    for row, slot, anchor in rows.slots():
        tokens[row, slot, 1] = rows.input_ids_RL[row, anchor : anchor + 5]
    phi, target = _fast(model, rows, tokens, DEPTHS, "mean_pooling")
    torch.testing.assert_close(phi[:, :, 1], target, atol=1e-5, rtol=0)
