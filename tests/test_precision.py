"""What a run computes in is not always what its weights are stored in."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from ebft_core import packed_logprobs, rollout
from ebft_core.bench import suite
from ebft_core.bench.measure import random_batch
from ebft_core.blocks import Blocks
from ebft_core.losses import TokenTerms
from ebft_core.rows import RowBatch
from ebft_core.trainers import step
from ebft_core.trainers.update import BatchCounts, accumulate_gradients
from tests.trainer_fixtures import make_config, tiny_llama

ANCHORS = torch.tensor([[4, 9, 17, 26], [5, 11, -1, -1]])
autocast = partial(torch.autocast, "cpu", torch.bfloat16)


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 40, (2, 30), generator=generator)
    return ids, torch.randint(0, 40, (2, 4, 3, 4), generator=generator)


def test_a_float32_model_trains_under_autocast() -> None:
    """Its rotary embedding returns float32 queries and keys beside bfloat16 values; both passes must run."""
    config = make_config(ebft={"n_samples_per_prompt": 3, "ce_coef": 0.1}).ebft
    ids, tokens = _inputs()
    batch = RowBatch(ids, ids.clone(), None, ANCHORS, torch.arange(2))
    terms = TokenTerms(weight=torch.ones(tokens.shape), samples=torch.ones(tokens.shape), reference=None)
    counts = BatchCounts(actions=72, labels=58)
    gradients = []
    for context in (nullcontext, autocast):
        model = tiny_llama()
        blocks = Blocks.full(tokens, ANCHORS)
        sums = accumulate_gradients(
            model, batch, blocks, terms, config, counts, attention="sdpa", max_tokens=20, autocast=context
        )
        assert sums.loss == pytest.approx(sums.rl + 0.1 * sums.ce)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert gradients[-1].dtype == torch.float32
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99
    assert not torch.equal(*gradients)

    exact = packed_logprobs(model, ids, ANCHORS, tokens, temperature=1.0)
    sampled = rollout(model, ids, ANCHORS, n_samples=3, generate_max_len=4, temperature=0.0)
    with autocast():
        rounded = packed_logprobs(model, ids, ANCHORS, tokens, temperature=1.0)
        rolled = rollout(model, ids, ANCHORS, n_samples=3, generate_max_len=4, temperature=0.0)
    assert 0 < (exact - rounded).abs().mean() < 0.1
    assert (rolled == sampled).float().mean() > 0.8
    rounded.sum().backward()


@pytest.mark.parametrize(
    ("weights", "context", "expected"),
    [
        (torch.float32, nullcontext, 1e-5),
        (torch.float32, autocast, 2**-7),
        (torch.bfloat16, nullcontext, 2**-7),
    ],
    ids=["float32", "autocast", "bfloat16"],
)
@pytest.mark.parametrize("embed_method", ["last_token", "mean_pooling"])
def test_whitening_trusts_features_no_further_than_they_were_computed(
    monkeypatch: pytest.MonkeyPatch, weights: torch.dtype, context, expected: float, embed_method: str
) -> None:
    """Under autocast and after pooling by weights the states are float32 and still rounded to bfloat16."""
    used = []

    def spy(gram: torch.Tensor, **settings):
        used.append(settings["whiten_tol"])
        return rewards_from_gram(gram, **settings)

    rewards_from_gram = step.rewards_from_gram
    monkeypatch.setattr(step, "rewards_from_gram", spy)
    config = make_config(ebft={"embed_method": embed_method}).ebft
    batch = random_batch(30, 1, 40, config)
    tokens = torch.randint(0, 40, (1, batch.anchors_RA.shape[1], 4, 4))
    with context():
        step.score(tiny_llama().to(weights), batch, Blocks.full(tokens, batch.anchors_RA), config, "sdpa")
    assert used == [expected]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_bench_measures_what_the_run_would_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path, precision: str
) -> None:
    """Full fine-tuning: float32 weights, computing in the run's precision, with its execution settings."""
    tiny_llama().save_pretrained(tmp_path)
    config = make_config(
        trainer={
            "precision": precision, "batch_size": 1, "tokens_per_forward": 32, "share_prefixes": False
        }
    )  # fmt: skip
    seen = []

    def spy(policy, _features, _batch, **settings):
        with settings.pop("autocast")():
            enabled = torch.is_autocast_enabled("cpu")
        seen.append((policy.dtype, enabled, settings["max_tokens"], settings["share_prefixes"]))
        return suite.PhaseTimes(1.0, 1.0, 1.0)

    monkeypatch.setattr(suite, "timed_step", spy)
    suite.run_bench(tmp_path, config, rounds=1)
    assert set(seen) == {(torch.float32, precision == "bfloat16", 32, False)}
