"""Oracle 4: advantages by hand, and unbiasedness by exhaustive enumeration on a 2-token vocabulary."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ebft_core import RewardOutput, group_advantages, group_rewards
from ebft_core.losses import cfm, kl_penalty, policy_gradient_loss


def _record(alignment: Tensor, diversity: Tensor, alpha: float = 1.0, delta: float = 1.0) -> RewardOutput:
    return RewardOutput(
        reward=alpha * alignment - delta * diversity, alignment=alignment, diversity=diversity
    )


def test_rloo_by_hand() -> None:
    a, d = torch.tensor([3.0, 1.0, 0.0, 2.0]), torch.tensor([0.5, 0.0, 0.25, 0.25])
    # baseline_j = α (6 − a_j) / 3 − δ (1 − 2 d_j) / 2 with α = 2, δ = 4
    baseline = torch.tensor(
        [2 * 3 / 3 - 4 * 0.0, 2 * 5 / 3 - 4 * 0.5, 2 * 6 / 3 - 4 * 0.25, 2 * 4 / 3 - 4 * 0.25]
    )
    reward = 2 * a - 4 * d
    got = group_advantages(_record(a, d, 2.0, 4.0), estimator="rloo", alignment_coef=2.0, diversity_coef=4.0)
    torch.testing.assert_close(got, reward - baseline)


def test_rloo_with_two_samples_has_no_diversity_baseline() -> None:
    a, d = torch.tensor([[3.0, 1.0]]), torch.tensor([[0.5, 0.5]])
    got = group_advantages(_record(a, d), estimator="rloo")
    torch.testing.assert_close(got, torch.tensor([[3.0 - 1.0 - 0.5, 1.0 - 3.0 - 0.5]]))


@given(
    n=st.integers(3, 8),
    seed=st.integers(0, 10**6),
    alpha=st.floats(0, 3),
    delta=st.floats(0, 3),
)
def test_rloo_formula_and_zero_sum(n: int, seed: int, alpha: float, delta: float) -> None:
    rng = np.random.default_rng(seed)
    a, d = rng.normal(size=(2, 3, n)), rng.normal(size=(2, 3, n))
    got = group_advantages(
        _record(torch.from_numpy(a), torch.from_numpy(d), alpha, delta),
        estimator="rloo",
        alignment_coef=alpha,
        diversity_coef=delta,
    ).numpy()
    for j in range(n):
        others = [k for k in range(n) if k != j]
        baseline = alpha * a[..., others].mean(-1) - delta * (d.sum(-1) - 2 * d[..., j]) / (n - 2)
        np.testing.assert_allclose(got[..., j], alpha * a[..., j] - delta * d[..., j] - baseline, atol=1e-6)
    np.testing.assert_allclose(got.sum(-1), 0, atol=1e-5)


def test_diversity_baseline_leaves_the_sample_out() -> None:
    """Changing sample j's similarities must not change j's own baseline."""
    rng = np.random.default_rng(0)
    K = rng.normal(size=(5, 5))
    K = (K + K.T) / 2

    def baseline(K: np.ndarray) -> float:
        d = 2 * (K.sum(1) - np.diag(K)) / 4
        record = _record(torch.zeros(5, dtype=torch.float64), torch.from_numpy(d))
        return float(record.reward[0] - group_advantages(record, estimator="rloo")[0])

    before = baseline(K)
    K[0, 1:] += 1.0
    K[1:, 0] += 1.0
    assert baseline(K) == pytest.approx(before, abs=1e-6)
    K[1, 2] += 1.0
    K[2, 1] += 1.0
    assert abs(baseline(K) - before) > 1e-2


def test_group_norm() -> None:
    """(r − mean) / (std + 1e-8) over the N samples; the two usual definitions of std are accepted."""
    rng = np.random.default_rng(1)
    a, d = rng.normal(size=(4, 3, 5)), rng.normal(size=(4, 3, 5))
    record = _record(torch.from_numpy(a), torch.from_numpy(d), 0.5, 2.0)
    got = group_advantages(record, estimator="group_norm", alignment_coef=0.5, diversity_coef=2.0).numpy()
    reward = 0.5 * a - 2.0 * d
    centred = reward - reward.mean(-1, keepdims=True)
    candidates = [centred / (reward.std(-1, ddof=ddof, keepdims=True) + 1e-8) for ddof in (0, 1)]
    assert any(np.allclose(got, candidate, atol=1e-6) for candidate in candidates)


@pytest.mark.parametrize("n", range(2, 9))
def test_group_norm_of_equal_rewards_is_zero(n: int) -> None:
    """Collapsed groups have no signal: rounding of the mean must not be divided by a spread of 1e-8."""
    reward = torch.randn(500, 1, generator=torch.Generator().manual_seed(n)).expand(-1, n).contiguous()
    advantage = group_advantages(_record(reward, torch.zeros_like(reward)), estimator="group_norm")
    assert torch.equal(advantage, torch.zeros(500, n))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_reinforce_is_the_reward(n: int) -> None:
    rng = np.random.default_rng(2)
    a, d = torch.from_numpy(rng.normal(size=(3, n))), torch.from_numpy(rng.normal(size=(3, n)))
    got = group_advantages(
        _record(a, d, 0.5, 2.0), estimator="reinforce", alignment_coef=0.5, diversity_coef=2.0
    )
    torch.testing.assert_close(got, 0.5 * a - 2.0 * d)


@pytest.mark.parametrize("estimator", ["rloo", "group_norm"])
def test_one_sample_needs_reinforce(estimator: str) -> None:
    with pytest.raises(ValueError, match="1"):
        group_advantages(_record(torch.ones(1), torch.zeros(1)), estimator=estimator)


# ---------------------------------------------------------------------------------------------------
# Exhaustive enumeration. Vocabulary {0, 1}, blocks of two tokens: four sequences. The policy is a table
# of logits (first token; second token given the first), features are a fixed random table.

SEQUENCES = list(itertools.product((0, 1), repeat=2))


def _world() -> tuple[list[Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    first = torch.randn(2, generator=generator, dtype=torch.float64).requires_grad_()
    second = torch.randn(2, 2, generator=generator, dtype=torch.float64).requires_grad_()
    table = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(6, generator=generator, dtype=torch.float64)
    return (
        [first, second],
        torch.nn.functional.normalize(table, dim=-1),
        torch.nn.functional.normalize(y, dim=0),
    )


def _token_logprobs(policy: list[Tensor]) -> Tensor:
    """(4, 2): log-probability of each token of each sequence."""
    first, second = (logits.log_softmax(-1) for logits in policy)
    return torch.stack([torch.stack([first[s], second[s, t]]) for s, t in SEQUENCES])


def _exact_objective(policy: list[Tensor], table: Tensor, y: Tensor, alpha: float, delta: float) -> Tensor:
    """−CFM up to a constant, with weights: 2α μ·y − δ ‖μ‖²; for α = δ = 1 this is ‖y‖² − ‖μ − y‖²."""
    mean = _token_logprobs(policy).sum(-1).exp() @ table
    return 2 * alpha * mean @ y - delta * mean @ mean


def _flat_grad(value: Tensor, policy: list[Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, policy, retain_graph=True)])


def _tuples(n: int) -> Tensor:
    return torch.tensor(list(itertools.product(range(4), repeat=n)))


def _expected_estimator(
    policy: list[Tensor], table: Tensor, y: Tensor, n: int, estimator: str, alpha: float, delta: float
) -> Tensor:
    """E over all N-tuples of the gradient that the RL loss descends along (times −1)."""
    tuples = _tuples(n)
    logprob = _token_logprobs(policy)
    rewards = group_rewards(
        table[tuples],
        y.expand(len(tuples), -1),
        whitening="none",
        alignment_coef=alpha,
        diversity_coef=delta,
    )
    advantage = group_advantages(
        rewards, estimator=estimator, alignment_coef=alpha, diversity_coef=delta
    ).double()
    weight = logprob.sum(-1)[tuples].sum(-1).exp().detach()  # probability of each N-tuple
    # Every tuple is a group that occurs `weight` times: a weighted batch of groups, 1/N per sample.
    # policy_gradient_loss divides by action tokens (N·2 per group); the factor 2 undoes the tokens.
    loss = policy_gradient_loss((weight[:, None] * advantage)[None], logprob[tuples][None], n * 2) * 2
    return -_flat_grad(loss, policy)


@pytest.mark.parametrize(("alpha", "delta"), [(1.0, 1.0), (0.7, 1.6)])
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("estimator", ["rloo", "reinforce"])
def test_estimator_is_unbiased(estimator: str, n: int, alpha: float, delta: float) -> None:
    policy, table, y = _world()
    exact = _flat_grad(_exact_objective(policy, table, y, alpha, delta), policy)
    got = _expected_estimator(policy, table, y, n, estimator, alpha, delta)
    assert exact.norm() > 0.1
    # rewards come back in float32, hence not 1e-12
    torch.testing.assert_close(got, exact, atol=1e-6, rtol=0)


def test_minus_cfm_is_the_objective() -> None:
    policy, table, y = _world()
    mean = _token_logprobs(policy).sum(-1).exp() @ table
    minus_cfm = -((mean - y) ** 2).sum()
    torch.testing.assert_close(
        _flat_grad(minus_cfm, policy), _flat_grad(_exact_objective(policy, table, y, 1.0, 1.0), policy)
    )


def test_enumeration_can_see_a_biased_baseline() -> None:
    """Control: the plain leave-one-out of the diversity sum (a known error) is caught by the enumeration."""
    policy, table, y = _world()
    tuples, logprob = _tuples(3), _token_logprobs(policy)
    rewards = group_rewards(table[tuples], y.expand(len(tuples), -1), whitening="none")
    r = rewards.reward.double()
    biased = r - (r.sum(-1, keepdim=True) - r) / 2
    weight = logprob.sum(-1)[tuples].sum(-1).exp().detach()
    value = (weight * (biased * logprob.sum(-1)[tuples]).mean(-1)).sum()
    exact = _flat_grad(_exact_objective(policy, table, y, 1.0, 1.0), policy)
    assert (_flat_grad(value, policy) - exact).abs().max() > 1e-2


def test_one_sample_reinforce_follows_the_alignment_alone() -> None:
    policy, table, y = _world()
    exact = _flat_grad(_exact_objective(policy, table, y, 1.0, 0.0), policy)
    got = _expected_estimator(policy, table, y, 1, "reinforce", 1.0, 1.0)
    torch.testing.assert_close(got, exact, atol=1e-6, rtol=0)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_rloo_has_less_variance_than_reinforce(n: int) -> None:
    """What the baseline is for, computed exactly for N ≥ 3 (N = 2 has half a baseline)."""
    policy, table, y = _world()
    tuples, logprob = _tuples(n), _token_logprobs(policy)
    weight = logprob.sum(-1)[tuples].sum(-1).exp().detach()
    rewards = group_rewards(table[tuples], y.expand(len(tuples), -1), whitening="none")
    rows = torch.stack([_flat_grad(logprob[s].sum(), policy) for s in range(4)])
    variance = {}
    for estimator in ("rloo", "reinforce"):
        advantage = group_advantages(rewards, estimator=estimator).double()
        estimate = (advantage[..., None] * rows[tuples]).mean(1)
        mean = weight @ estimate
        variance[estimator] = float(weight @ ((estimate - mean) ** 2).sum(-1))
    assert variance["rloo"] < variance["reinforce"]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_unbiased_cfm(n: int) -> None:
    policy, table, y = _world()
    tuples = _tuples(n)
    weight = _token_logprobs(policy).sum(-1)[tuples].sum(-1).exp().detach()
    output = cfm(table[tuples], y.expand(len(tuples), -1))
    p = _token_logprobs(policy).sum(-1).exp().detach()
    exact = float(((p @ table - y) ** 2).sum())
    assert float(weight @ output.unbiased) == pytest.approx(exact, abs=1e-6)
    spread = float(p @ ((table - p @ table) ** 2).sum(-1))
    assert float(weight @ output.biased) == pytest.approx(exact + spread / n, abs=1e-6)


def _reference(policy: list[Tensor]) -> Tensor:
    """Token log-probabilities of a nearby policy, the frozen reference."""
    generator = torch.Generator().manual_seed(3)
    tables = [
        p.detach() + 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in policy
    ]
    return _token_logprobs(tables)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_values_by_enumeration(estimator: str) -> None:
    """Averaged over all sequences of the policy, k1 and k3 are KL(π‖π_ref)."""
    policy, _, _ = _world()
    logprob = _token_logprobs(policy).detach()
    reference = _reference(policy)
    probability = logprob.sum(-1).exp()
    exact = float(probability @ (logprob - reference).sum(-1))
    penalties = torch.stack([kl_penalty(logprob[s], reference[s], estimator, 1) for s in range(4)])
    assert float(probability @ penalties) == pytest.approx(exact, abs=1e-9)
    assert exact > 1e-3


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_gradients_by_enumeration(estimator: str) -> None:
    """As losses on samples of the policy: k1 has no gradient, k2 that of KL(π‖π_ref), k3 of KL(π_ref‖π)."""
    policy, _, _ = _world()
    logits = policy[0]
    logprob = logits.log_softmax(-1)
    reference = _reference(policy)[[0, 2], 0]  # first tokens 0 and 1
    exact = {
        "k1": 0 * logprob.sum(),
        "k2": (logprob.exp() * (logprob - reference)).sum(),
        "k3": (reference.exp() * (reference - logprob)).sum(),
    }
    penalties = torch.stack([kl_penalty(logprob[i], reference[i], estimator, 1) for i in range(2)])
    got = logprob.exp().detach() @ penalties
    torch.testing.assert_close(
        _flat_grad(got, [logits]), _flat_grad(exact[estimator], [logits]), atol=1e-9, rtol=0
    )


def test_policy_gradient_loss_divides_by_the_whole_batch() -> None:
    advantage = torch.tensor([[[1.0, -2.0]]])
    logprob = torch.tensor([[[[-1.0, -3.0], [-0.5, -0.25]]]])
    # −(1·(−4) + (−2)·(−0.75)) / 10
    assert policy_gradient_loss(advantage, logprob, 10).item() == pytest.approx(0.25)
