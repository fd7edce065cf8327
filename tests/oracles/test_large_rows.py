"""Rows large enough that attention, decoding and the head work in several chunks.

Small rows never leave the first chunk, so the other oracles would not see an error at a chunk's edge.
The second row has few anchors: most of its chunks hold none, and those must not give NaN either.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ebft_core import extract_features, packed_logprobs, rollout

from .slow_path import (
    Rows,
    assert_same_gradients,
    block_logits,
    gradients,
    make_rows,
    random_tokens,
    slow_features,
    slow_logprobs,
)
from .tiny_models import tiny_model

VOCAB = 37
N, G = 4, 4


def _rows() -> Rows:
    """340 and 12 blocks of four tokens, in documents of unequal length."""
    dense = list(range(2, 87))
    documents = [[90], [31, 9]]
    return make_rows([90, 40], [dense, [5, 20, 33]], vocab=VOCAB, documents=documents, seed=5)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_logprobs_and_gradients(architecture: str) -> None:
    model = tiny_model(architecture, vocab=VOCAB, layers=2)
    rows = _rows()
    tokens = random_tokens(rows, N, G, vocab=VOCAB)
    weights = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(7))
    fast = packed_logprobs(
        model,
        rows.input_ids_RL,
        rows.anchors_RA,
        tokens,
        temperature=0.7,
        document_ids_RL=rows.document_ids_RL,
    )
    slow = slow_logprobs(model, rows, tokens, temperature=0.7)
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)
    fast_gradients = gradients(model, (weights * fast).sum())
    assert_same_gradients(fast_gradients, gradients(model, (weights * slow).sum()))


def _slow_greedy(model: torch.nn.Module, prefix: Tensor) -> list[int]:
    block: list[int] = []
    for _ in range(G):
        with torch.no_grad():
            logits = block_logits(model, prefix, torch.tensor([*block, 0]))
        block.append(int(logits[-1].argmax()))
    return block


@pytest.mark.parametrize("architecture", ["qwen3", "gpt_neox"])
def test_greedy_rollout(architecture: str) -> None:
    model = tiny_model(architecture, vocab=VOCAB, layers=2)
    rows = _rows()
    tokens = rollout(
        model,
        rows.input_ids_RL,
        rows.anchors_RA,
        n_samples=N,
        generate_max_len=G,
        temperature=0.0,
        document_ids_RL=rows.document_ids_RL,
    )
    for row, slot, anchor in rows.slots():
        expected = _slow_greedy(model, rows.prefix(row, anchor))
        assert tokens[row, slot].tolist() == [expected] * N, (row, anchor)


@pytest.mark.parametrize("method", ["last_token", "mean_pooling"])
def test_features(method: str) -> None:
    model = tiny_model("qwen2", vocab=VOCAB, layers=4)
    rows = _rows()
    tokens = random_tokens(rows, N, G, vocab=VOCAB)
    depths = [0.25, 0.75]
    fast = extract_features(
        model,
        rows.input_ids_RL,
        rows.anchors_RA,
        tokens,
        feature_layers=depths,
        embed_method=method,
        document_ids_RL=rows.document_ids_RL,
    )
    slow = slow_features(model, rows, tokens, depths, method)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=0)
