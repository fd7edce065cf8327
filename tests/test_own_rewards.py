"""Own rewards: loading, calling, checking; advantages against TRL's RLOO trainer on the same rollouts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ebft_core import RewardOutput, group_advantages
from ebft_core.advantages import own_advantages, total_advantages
from ebft_core.config import OwnRewardConfig, RunConfig
from ebft_core.errors import UserError
from ebft_core.losses import policy_gradient_loss
from ebft_core.own_rewards import OwnRewards, combine_own, fingerprint_rewards
from ebft_core.runs import plan_run
from tests.trl_fixtures import letters_tokenizer, tiny_llama

MODULE = """
import asyncio
import numpy as np
import torch

def length(completions, **kwargs):
    return [len(text) for text in completions]

def right(completions, answer, **kwargs):
    return [float(a in c) for a, c in zip(answer, completions)]

def some(prompts, completion_ids, **kwargs):
    return [None if p == "skip" else ids[0] for p, ids in zip(prompts, completion_ids)]

def numbers(completions, **kwargs):
    return [True, np.float32(0.5), torch.tensor(0.25), 2][: len(completions)]

def helpers(completions, trainer_state, log_extra, log_metric, **kwargs):
    log_extra("first", [c[0] for c in completions])
    log_metric("step", trainer_state["step"])
    log_metric("step", trainer_state["step"] + 1)
    return [0.0] * len(completions)

def too_few(completions, log_extra, **kwargs):
    log_extra("short", completions[1:])
    return [0.0] * len(completions)

loops, running, most_at_once = set(), 0, 0

async def judge(completions, **kwargs):
    global running, most_at_once
    loops.add(id(asyncio.get_running_loop()))
    running += 1
    most_at_once = max(running, most_at_once)
    await asyncio.sleep(0.01)
    running -= 1
    return [0.5] * len(completions)

class Judge:
    async def __call__(self, completions, **kwargs):
        return await judge(completions, **kwargs)

other_judge = Judge()

def short(completions, **kwargs):
    return [1.0]

def text(completions, **kwargs):
    return ["good"] * len(completions)

def nan(completions, **kwargs):
    return [float("nan")] * len(completions)

def pairs(completions, **kwargs):
    return [[1.0, 2.0]] * len(completions)

def arrays(completions, **kwargs):
    return [torch.zeros(2)] * len(completions)

def nothing(completions, **kwargs):
    pass

def word(completions, **kwargs):
    return "ab"

def broken(completions, **kwargs):
    raise KeyError("oops")

async def broken_async(completions, **kwargs):
    raise KeyError("oops")

def no_kwargs(prompts, completions):
    return [0.0] * len(completions)

def positional(completions, /, **kwargs):
    return [0.0] * len(completions)

constant = 3
"""
BATCH = {
    "prompts": ["a", "a", "skip", "skip"],
    "completions": ["xx", "y", "zzz", "w"],
    "completion_ids": [[5, 6], [7], [8, 9, 9], [4]],
    "columns": {"answer": ["x", "x", "q", "w"]},
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`my_rewards.py` beside the run file."""
    (tmp_path / "my_rewards.py").write_text(MODULE)
    (tmp_path / "my_broken.py").write_text("import no_such_package_at_all\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield "my_rewards"
    sys.path[:] = before
    for name in ("my_rewards", "my_broken"):
        sys.modules.pop(name, None)


def _load(*names: str, weights: tuple[float, ...] = ()) -> OwnRewards:
    weights = weights or (1.0,) * len(names)
    pairs = zip(names, weights, strict=True)
    return OwnRewards([OwnRewardConfig(module=f"my_rewards:{name}", weight=w) for name, w in pairs])


def test_functions_are_called_as_trl_calls_them(module: str) -> None:
    output = _load("length", "right", "some").score(**BATCH)
    assert output.rewards == [[2, 1, 3, 1], [1, 0, 0, 1], [5, 7, None, None]]
    assert output.metrics == {}


def test_numbers_of_other_libraries_are_numbers(module: str) -> None:
    assert _load("numbers").score(**BATCH).rewards == [[1.0, 0.5, 0.25, 2.0]]


def test_trls_helpers_are_there(module: str) -> None:
    output = _load("helpers").score(**BATCH, trainer_state={"step": 3})
    assert output.metrics == {"step": 3.5}
    assert output.extra == {"first": ["x", "y", "z", "w"]}


def test_a_column_of_another_length_is_refused(module: str) -> None:
    with pytest.raises(UserError, match="3 entries for 4 completions") as caught:
        _load("too_few").score(**BATCH)
    assert caught.value.where == "rewards"


def test_coroutines_run_together_and_keep_their_loop(module: str) -> None:
    own = _load("judge", "length", "other_judge")
    assert own.score(**BATCH).rewards == [[0.5] * 4, [2, 1, 3, 1], [0.5] * 4]
    state = sys.modules["my_rewards"]
    assert state.most_at_once == 2
    own.score(**BATCH)
    assert len(state.loops) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", "1 rewards for 4 completions"),
        ("text", "'good' for completion 0"),
        ("nan", "nan for completion 0"),
        ("pairs", "for completion 0"),
        ("arrays", "for completion 0"),
        ("nothing", "NoneType"),
        ("word", "str"),
        ("broken", "KeyError: 'oops'"),
        ("broken_async", "KeyError: 'oops'"),
    ],
)
def test_what_is_no_reward_is_an_error_that_names_the_function(module: str, name: str, message: str) -> None:
    own = _load("length", name)
    with pytest.raises(UserError) as caught:
        own.score(**BATCH)
    assert caught.value.where == "rewards[1].module"
    assert f"my_rewards:{name}" in caught.value.render()
    assert message in caught.value.render()


def test_missing_column_is_named(module: str) -> None:
    with pytest.raises(UserError, match="answer") as caught:
        _load("right").score(**{**BATCH, "columns": {"solution": ["x"] * 4}})
    assert "solution" in caught.value.render()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_rewards:no_kwargs", r"\*\*kwargs"),
        ("my_rewards:positional", "keyword arguments"),
        ("my_rewards:absent", "no such function"),
        ("my_rewards:constant", "no such function"),
        ("my_broken:f", "reward function's module does not import"),
        ("nowhere_to_be_found:f", "no such module"),
    ],
)
def test_functions_that_cannot_be_called_are_refused_before_anything_runs(
    module: str, name: str, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        OwnRewards([OwnRewardConfig(module=name)])
    assert caught.value.where == "rewards[0].module"


def test_fingerprint_follows_the_file(module: str, tmp_path: Path) -> None:
    configs = [OwnRewardConfig(module="my_rewards:length"), OwnRewardConfig(module="my_rewards:right")]
    before = fingerprint_rewards(configs)
    assert len(before) == 2
    (tmp_path / "my_rewards.py").write_text(MODULE + "\n# changed\n")
    assert set(before).isdisjoint(fingerprint_rewards(configs))


def test_an_edited_function_trains_anew_and_nothing_before(module: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    config = RunConfig.model_validate(
        {
            "model": {"from_scratch": {"sources": [str(tmp_path / "a.txt")]}},
            "data": {"sources": [{"path": str(tmp_path / "a.txt")}]},
            "rewards": [{"module": "my_rewards:length"}],
        }
    )
    before = {stage.name: stage.key for stage in plan_run(config).stages}
    (tmp_path / "my_rewards.py").write_text(MODULE + "\n# changed\n")
    after = {stage.name: stage.key for stage in plan_run(config).stages}
    changed = {name for name, key in before.items() if after[name] != key}
    assert changed == set(before) - {"prepare_base", "tokenize"}


def test_planning_needs_no_torch() -> None:
    code = "import sys; import ebft_core.own_rewards; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_combine_own_weighs_and_leaves_out() -> None:
    total = combine_own([[1.0, 2.0, None, None], [10.0, None, 30.0, None]], [0.5, 0.1], (1, 2, 2))
    torch.testing.assert_close(total, torch.tensor([[[1.5, 1.0], [3.0, torch.nan]]]), equal_nan=True)


# ---------------------------------------------------------------------------------------------------
# Advantages


def _rewards(alignment: Tensor, diversity: Tensor) -> RewardOutput:
    return RewardOutput(alignment - diversity, alignment, diversity)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_leave_one_out_by_hand_with_gaps(n: int) -> None:
    rng = np.random.default_rng(n)
    reward = rng.normal(size=(40, n))
    reward[rng.random((40, n)) < 0.3] = np.nan
    got = own_advantages(torch.from_numpy(reward), estimator="rloo").numpy()
    for row, advantages in zip(reward, got, strict=True):
        for j in range(n):
            others = [row[k] for k in range(n) if k != j and not np.isnan(row[k])]
            alone = np.isnan(row[j]) or not others
            assert advantages[j] == pytest.approx(0.0 if alone else row[j] - np.mean(others), abs=1e-12)


def test_own_rewards_keep_the_parts_of_the_feature_reward() -> None:
    generator = torch.Generator().manual_seed(0)
    a, d, own = (torch.randn(3, 4, generator=generator) for _ in range(3))
    rewards = _rewards(a, d)
    for estimator in ("rloo", "reinforce"):
        parts = group_advantages(rewards, estimator=estimator) + own_advantages(own, estimator=estimator)
        torch.testing.assert_close(total_advantages(rewards, own, estimator=estimator), parts)
        assert torch.equal(
            total_advantages(rewards, None, estimator=estimator),
            group_advantages(rewards, estimator=estimator),
        )


def test_group_norm_keeps_the_meaning_of_weights() -> None:
    """Normalising the parts one by one would cancel every weight."""
    generator = torch.Generator().manual_seed(0)
    a, d, own = (torch.randn(3, 4, generator=generator) for _ in range(3))
    own[0, 1] = torch.nan
    got = total_advantages(_rewards(a, d), 0.01 * own, estimator="group_norm")
    total = (a - d + 0.01 * own.nan_to_num()).numpy().astype(np.float64)
    expected = (total - total.mean(-1, keepdims=True)) / (total.std(-1, ddof=1, keepdims=True) + 1e-8)
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-5)


def test_equal_own_rewards_are_no_signal() -> None:
    reward = torch.rand(200, 1, generator=torch.Generator().manual_seed(1)).expand(-1, 6).contiguous()
    assert torch.equal(own_advantages(reward, estimator="group_norm"), torch.zeros(200, 6))
    assert own_advantages(reward, estimator="rloo").abs().max() < 1e-6


def test_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="advantage_estimator"):
        own_advantages(torch.zeros(2), estimator="grpo")


# ---------------------------------------------------------------------------------------------------
# TRL's RLOO trainer as an oracle


def _count_as(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [None if 9 in ids else ids.count(6) - 0.25 * len(ids) for ids in completion_ids]


def _odd(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [float(sum(ids) % 3) for ids in completion_ids]


@pytest.mark.slow
@pytest.mark.parametrize("functions", [[_count_as], [_count_as, _odd]])
def test_advantages_and_gradient_equal_trls_rloo(functions: list[Any], tmp_path: Path) -> None:
    """One step of TRL's trainer: its rollouts through our advantages, our log-probs and our loss."""
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    from ebft_core import packed_logprobs

    caught: dict[str, Any] = {}

    class Spy(RLOOTrainer):
        def _calculate_rewards(self, *args: Any) -> Tensor:
            caught["rewards"] = super()._calculate_rewards(*args)
            return caught["rewards"]

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            caught["inputs"] = super()._generate_and_score_completions(inputs)  # in groups; shuffled later
            return caught["inputs"]

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            weights = list(model.parameters())
            caught["gradient"] = torch.autograd.grad(loss, weights, retain_graph=True)
            return loss

    tokenizer = letters_tokenizer()
    model = tiny_llama(tokenizer)
    weights = [0.7, 0.2][: len(functions)]
    arguments = RLOOConfig(
        output_dir=str(tmp_path),
        max_steps=1,
        num_generations=4,
        per_device_train_batch_size=16,
        max_completion_length=6,
        temperature=0.8,
        reward_weights=weights,
        beta=0.0,
        learning_rate=0.0,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    data = Dataset.from_dict({"prompt": ["abca", "ddeb", "fafa", "hgbb"]})  # equal lengths: no left padding
    Spy(
        model=model, args=arguments, reward_funcs=functions, train_dataset=data, processing_class=tokenizer
    ).train()

    per_function = caught["rewards"].T.tolist()
    rewards = [[None if np.isnan(v) else v for v in row] for row in per_function]
    assert any(None in row for row in rewards)
    assert any(v is not None and v != rewards[0][0] for v in rewards[0])
    advantage_RAN = own_advantages(combine_own(rewards, weights, (4, 1, 4)), estimator="rloo")
    inputs = caught["inputs"]
    torch.testing.assert_close(advantage_RAN.flatten(), inputs["advantages"], atol=1e-6, rtol=0)
    assert advantage_RAN.abs().max() > 0.1

    tokens_RANG = inputs["completion_ids"].view(4, 1, 4, -1)
    logprob_RANG = packed_logprobs(
        model.train(False), inputs["prompt_ids"][::4], torch.full((4, 1), 4), tokens_RANG, temperature=0.8
    )
    logprob_RANG = logprob_RANG * inputs["completion_mask"].view_as(tokens_RANG)
    # TRL sums a sequence's log-probs and averages over sequences; we divide by action tokens.
    loss = policy_gradient_loss(advantage_RAN, logprob_RANG, action_count=16)
    ours = torch.autograd.grad(loss, list(model.parameters()))
    for mine, theirs in zip(ours, caught["gradient"], strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    assert max(float(g.abs().max()) for g in ours) > 1e-3
