"""The baseline of the benchmarks computes what the product computes, so a ratio compares equal work."""

from __future__ import annotations

import pytest
import torch

from benchmarks import full_recompute as plain
from ebft_core import extract_features, group_advantages, group_rewards, packed_logprobs, rollout
from ebft_core.bench.cost_model import ModelCost, StepShape, step_flops
from ebft_core.bench.measure import matrix_peak, random_batch, shape_of, timed_step, uniforms_for
from ebft_core.features import layer_indices
from tests.trainer_fixtures import CPU, make_config, tiny_llama

CONFIG = make_config().ebft


@pytest.fixture(scope="module")
def batch():
    return random_batch(40, 2, 40, CONFIG)


def test_the_baseline_agrees_with_the_product(batch) -> None:
    model = tiny_llama().eval()
    ids, anchors = batch.input_ids_RL, batch.anchors_RA
    uniforms = uniforms_for(batch, CONFIG)
    tokens = plain.plain_rollout(model, ids, anchors, uniforms, CONFIG.temperature)
    N, G = CONFIG.n_samples_per_prompt, CONFIG.generate_max_len
    ours = rollout(
        model,
        ids,
        anchors,
        n_samples=N,
        generate_max_len=G,
        temperature=CONFIG.temperature,
        uniforms_RANG=uniforms,
    )
    # A uniform number that falls on a rounding error of the cumulative sum may pick the neighbouring token.
    assert (tokens == ours).float().mean() > 0.99

    layers = layer_indices(CONFIG.feature_layers, 4)
    phi, target = plain.plain_features(model, ids, anchors, ours, layers)
    our_phi, our_target = extract_features(
        model, ids, anchors, ours, feature_layers=CONFIG.feature_layers, embed_method="last_token"
    )
    torch.testing.assert_close(phi, our_phi, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(target, our_target, rtol=1e-4, atol=1e-5)

    reward, advantage = plain.plain_rewards(our_phi, our_target)
    rewards = group_rewards(our_phi, our_target, whitening="feature")
    torch.testing.assert_close(reward, rewards.reward, rtol=0, atol=2e-2)  # float32 whitening on their side
    torch.testing.assert_close(advantage, group_advantages(rewards, estimator="rloo"), rtol=0, atol=4e-2)

    torch.testing.assert_close(
        plain.plain_logprobs(model, ids, anchors, ours, 0.7),
        packed_logprobs(model, ids, anchors, ours, temperature=0.7),
        rtol=1e-4,
        atol=1e-5,
    )


def test_both_steps_can_be_timed(batch) -> None:
    policy, frozen = tiny_llama(), tiny_llama()
    for times in (
        timed_step(policy, frozen, batch, CONFIG, "sdpa"),
        plain.timed_plain_step(policy, frozen, batch, CONFIG),
    ):
        assert min(times.rollout, times.features, times.update) > 0
        assert times.step == pytest.approx(times.rollout + times.features + times.update)
        assert policy.lm_head.weight.grad is not None


def test_cost_model_by_hand(batch) -> None:
    """A model of known sizes: q, o 32·32, k, v 32·16, three MLP matrices 32·48, four layers."""
    cost = ModelCost.of(tiny_llama())
    per_layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    assert cost == ModelCost(decoder=4 * per_layer, head=32 * 40, num_hidden_layers=4, trains_all=True)
    shape = StepShape(rows=2, length=40, anchors=9, n_samples=4, generate_max_len=4)
    assert shape_of(batch, CONFIG) == shape
    flops = step_flops(cost, shape, [0.25, 0.5, 0.75])
    fed, scored = 40 + 3 * 36, 9 + 3 * 36
    assert flops.rollout == 2 * (2 * 4 * per_layer * fed + 2 * 32 * 40 * scored)
    assert flops.features == 2 * 2 * 3 * per_layer * (40 + 36 * 4)
    assert flops.update == 3 * flops.rollout


def test_peak_is_a_rate() -> None:
    assert matrix_peak(CPU, torch.float32, size=128, rounds=2) > 1e7
