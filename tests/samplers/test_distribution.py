"""The truncations against the test server's own implementation of vLLM's order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebft_core.samplers.distribution import draw, sampling_logprobs
from tests.samplers.builders import sampling_config
from tests.vllm_server.stub_models import processed


@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 0.6, 1.0, 2.0]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    min_p=st.sampled_from([0.0, 0.1, 0.9]),
    penalty=st.sampled_from([0.7, 1.0, 1.3]),
)
def test_equal_to_the_servers_processing(
    seed: int, temperature: float, top_p: float, top_k: int, min_p: float, penalty: float
) -> None:
    rng = np.random.default_rng(seed)
    logits_XV = rng.normal(0.0, 2.0, (3, 11))
    rows = [rng.integers(0, 11, 4).tolist() for _ in range(3)]
    body = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": penalty,
    }
    seen_XV = torch.zeros(3, 11, dtype=torch.bool)
    for x, row in enumerate(rows):
        seen_XV[x, row] = True
    found = sampling_logprobs(torch.tensor(logits_XV), seen_XV, sampling_config(**body).ebft).numpy()
    for x, row in enumerate(rows):
        expected = processed(logits_XV[x], row, body)
        assert np.isfinite(found[x]).tolist() == np.isfinite(expected).tolist()
        finite = np.isfinite(expected)
        np.testing.assert_allclose(found[x][finite], expected[finite], atol=2e-5)


def test_the_cumulative_distribution_is_inverted() -> None:
    logprob_XV = torch.tensor([[0.0, 0.25, 0.25, 0.5, 0.0]]).log()
    numbers = torch.tensor([0.0, 0.2499, 0.25, 0.4999, 0.5, 1 - 2**-24])
    tokens, chosen = draw(logprob_XV.expand(6, -1), numbers)
    assert tokens.tolist() == [1, 1, 2, 2, 3, 3]
    assert chosen.tolist() == pytest.approx(np.log([0.25, 0.25, 0.25, 0.25, 0.5, 0.5]).tolist())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_stop_the_run(bad: float) -> None:
    logits_XV = torch.zeros(2, 5)
    logits_XV[1, 3] = bad
    logprob_XV = sampling_logprobs(logits_XV, None, sampling_config().ebft)
    with pytest.raises(FloatingPointError, match="training has diverged"):
        draw(logprob_XV, torch.tensor([0.5, 0.5]))
