"""The FlexAttention backend gives the slow path's numbers too.

On the CPU it has no backward pass, so gradients are compared on CUDA only.
"""

from __future__ import annotations

import pytest
import torch

from ebft_core import extract_features, packed_logprobs

from .slow_path import (
    Rows,
    assert_same_gradients,
    gradients,
    make_rows,
    random_tokens,
    slow_features,
    slow_logprobs,
)
from .tiny_models import tiny_model

VOCAB = 37


def _rows() -> Rows:
    """Packed documents, a row with fewer anchors, and a number of tokens that no block size divides."""
    documents = [[19, 40, 8], [6, 31]]
    anchors = [[2, 6, 10, 25, 40, 54, 62], [1, 18]]
    return make_rows([67, 37], anchors, vocab=VOCAB, documents=documents, seed=3)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "gpt_neox"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_values_on_cpu(architecture: str) -> None:
    model, rows = tiny_model(architecture, vocab=VOCAB), _rows()
    tokens = random_tokens(rows, 3, 4, vocab=VOCAB)
    ids = rows.document_ids_RL
    with torch.no_grad():
        fast = packed_logprobs(
            model,
            rows.input_ids_RL,
            rows.anchors_RA,
            tokens,
            temperature=0.7,
            document_ids_RL=ids,
            attention="flex",
        )
        slow = slow_logprobs(model, rows, tokens, temperature=0.7)
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)
    phi, target = extract_features(
        model,
        rows.input_ids_RL,
        rows.anchors_RA,
        tokens,
        feature_layers=[0.5, 0.75],
        embed_method="last_token",
        document_ids_RL=ids,
        attention="flex",
    )
    slow_phi, slow_target = slow_features(model, rows, tokens, [0.5, 0.75], "last_token")
    torch.testing.assert_close(phi.double(), slow_phi, atol=1e-5, rtol=0)
    torch.testing.assert_close(target.double(), slow_target, atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["flex", "sdpa"])
def test_gradients_on_cuda(attention: str) -> None:
    """qwen3: grouped keys and values, and a head of 16, the smallest the compiled kernel takes."""
    rows = _rows()
    tokens = random_tokens(rows, 3, 4, vocab=VOCAB)
    weights = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(7))
    slow_model = tiny_model("qwen3", vocab=VOCAB)
    slow = slow_logprobs(slow_model, rows, tokens, temperature=0.7)
    model = tiny_model("qwen3", vocab=VOCAB).cuda()
    assert rows.document_ids_RL is not None
    fast = packed_logprobs(
        model,
        rows.input_ids_RL.cuda(),
        rows.anchors_RA.cuda(),
        tokens.cuda(),
        temperature=0.7,
        document_ids_RL=rows.document_ids_RL.cuda(),
        attention=attention,
    )
    torch.testing.assert_close(fast.cpu(), slow, atol=1e-4, rtol=1e-4)
    actual = {name: g.cpu() for name, g in gradients(model, (weights.cuda() * fast).sum()).items()}
    assert_same_gradients(actual, gradients(slow_model, (weights * slow).sum()), rtol=1e-3)
