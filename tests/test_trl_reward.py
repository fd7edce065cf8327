"""The EBFT reward as a TRL reward function: against plain forwards, refusals, inside TRL's trainer."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from oracles.slow_rewards import expected_rewards
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from ebft_core.config import EBFTConfig
from ebft_core.errors import UserError
from ebft_core.trl_reward import FeatureReward
from tests.trl_fixtures import letters_tokenizer, tiny_llama

EOS = 1
PROMPTS = ["abc", "ab", "hgfedc"]
TRUTHS = ["de", "cdefgh", "b"]
N = 3


def _ids(text: str, *, end: bool = False) -> list[int]:
    return [6 + "abcdefgh ".index(letter) for letter in text] + [EOS] * end


COMPLETIONS = [
    [_ids("de", end=True), _ids("hhhhh"), _ids("a", end=True)],  # the first is the ground truth itself
    [_ids("cc"), _ids("cc"), _ids("dcba", end=True)],  # a duplicate
    [_ids("b"), _ids("ba"), _ids("bad", end=True)],
]


def _call(reward: FeatureReward, completions: list[list[list[int]]], **columns: Any) -> list[float | None]:
    flat = [ids for group in completions for ids in group]
    columns = {"ground_truth": [truth for truth in TRUTHS for _ in range(N)], **columns}
    prompts = [prompt for prompt in PROMPTS for _ in range(N)]
    return reward(prompts=prompts, completions=["" for _ in flat], completion_ids=flat, **columns)


def _feature(model: LlamaForCausalLM, prefix: list[int], block: list[int], method: str) -> np.ndarray:
    """One plain forward of prefix + block, in the library's own hidden states."""
    with torch.no_grad():
        states = model(input_ids=torch.tensor([prefix + block]), output_hidden_states=True).hidden_states
    parts = []
    for layer in (1, 2):  # ⌊0.5·3⌋ and ⌊0.75·3⌋
        hidden = states[layer][0, len(prefix) :].double().numpy()
        vector = hidden[-1] if method == "last_token" else hidden.mean(axis=0)
        parts.append(vector / np.linalg.norm(vector))
    return np.concatenate(parts) / np.sqrt(2)


def _expected(
    model: LlamaForCausalLM,
    prompts: list[list[int]],
    truths: list[list[int]],
    completions: list[list[list[int]]],
    config: EBFTConfig,
) -> np.ndarray:
    rewards = []
    for prompt, truth, samples in zip(prompts, truths, completions, strict=True):
        X = np.stack([_feature(model, prompt, ids, config.embed_method) for ids in samples])
        y = _feature(model, prompt, truth, config.embed_method)
        rewards += [
            expected_rewards(
                X, y, config.whitening, config.alignment_coef, config.diversity_coef, config.whiten_tol
            ).reward
        ]
    return np.concatenate(rewards)


def _config(whitening: str = "none", method: str = "last_token", **settings: Any) -> EBFTConfig:
    return EBFTConfig(feature_layers=[0.5, 0.75], whitening=whitening, embed_method=method, **settings)


@pytest.mark.parametrize("whitening", ["none", "feature"])
@pytest.mark.parametrize("method", ["last_token", "mean_pooling"])
@pytest.mark.parametrize("bos", [False, True])
def test_rewards_equal_plain_forwards(whitening: str, method: str, bos: bool) -> None:
    """Lengths differ within a group, from the ground truth's, and between groups."""
    tokenizer = letters_tokenizer(bos=bos)
    model = tiny_llama(tokenizer)
    config = _config(whitening, method, alignment_coef=0.8, diversity_coef=0.6)
    reward = FeatureReward(model, tokenizer, num_generations=N, config=config, groups_per_forward=2)
    got = _call(reward, COMPLETIONS)
    prompts = [[3] * bos + _ids(prompt) for prompt in PROMPTS]
    truths = [_ids(truth, end=True) for truth in TRUTHS]
    expected = _expected(model, prompts, truths, COMPLETIONS, config)
    np.testing.assert_allclose(got, expected, atol=2e-4)
    assert np.ptp(expected) > 0.1


def test_duplicates_are_exact_in_bfloat16() -> None:
    tokenizer = letters_tokenizer()
    model = tiny_llama(tokenizer).to(torch.bfloat16)
    reward = FeatureReward(model, tokenizer, num_generations=N, config=_config("feature"))
    got = _call(reward, [[_ids("cdef")] * 3] * 3)
    assert all(value == got[3 * (i // 3)] for i, value in enumerate(got))


def test_a_ground_truth_need_not_end() -> None:
    tokenizer = letters_tokenizer()
    model = tiny_llama(tokenizer)
    reward = FeatureReward(model, tokenizer, num_generations=N, config=_config(), end_of_sequence=False)
    got = _call(reward, COMPLETIONS)
    truths = [_ids(truth) for truth in TRUTHS]
    expected = _expected(model, [_ids(p) for p in PROMPTS], truths, COMPLETIONS, _config())
    np.testing.assert_allclose(got, expected, atol=2e-4)


@pytest.mark.parametrize("as_messages", [False, True])
def test_chats_go_through_the_template(as_messages: bool) -> None:
    tokenizer = letters_tokenizer(bos=True)  # the template writes the start token; it must not come twice
    model = tiny_llama(tokenizer)
    prompt = [{"role": "user", "content": "ab"}]
    truth: Any = [{"role": "assistant", "content": "cd"}] if as_messages else "cd"
    samples = [_ids("cd", end=True), _ids("hhh"), _ids("a", end=True)]
    reward = FeatureReward(model, tokenizer, num_generations=N, config=_config())
    got = reward(
        prompts=[prompt] * N,
        completions=[[{"role": "assistant", "content": "?"}]] * N,
        completion_ids=samples,
        ground_truth=[truth] * N,
    )
    prompt_ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    assert prompt_ids.count(3) <= 2
    expected = _expected(model, [prompt_ids], [_ids("cd", end=True)], [samples], _config())
    np.testing.assert_allclose(got, expected, atol=2e-4)


def test_the_goal_does_not_move_with_the_policy() -> None:
    tokenizer = letters_tokenizer()
    policy = tiny_llama(tokenizer)
    reward = FeatureReward(policy, tokenizer, num_generations=N, config=_config())
    before = _call(reward, COMPLETIONS)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(0.5)
    assert _call(reward, COMPLETIONS) == before


def test_a_peft_policy_counts_without_its_adapters() -> None:
    tokenizer = letters_tokenizer()
    base = tiny_llama(tokenizer)
    expected = _call(FeatureReward(base, tokenizer, num_generations=N, config=_config()), COMPLETIONS)
    adapted = get_peft_model(
        copy.deepcopy(base), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    )
    got = _call(FeatureReward(adapted, tokenizer, num_generations=N, config=_config()), COMPLETIONS)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_groups_without_usable_features_have_no_reward_and_are_counted() -> None:
    tokenizer = letters_tokenizer()
    reward = FeatureReward(tiny_llama(tokenizer), tokenizer, num_generations=N, config=_config())
    metrics: dict[str, list[float]] = defaultdict(list)
    with_empty = [COMPLETIONS[0], [_ids("a"), [], _ids("b")], COMPLETIONS[2]]
    got = _call(reward, with_empty, log_metric=lambda name, value: metrics[name].append(value))
    assert got[3:6] == [None, None, None]
    assert None not in got[:3] + got[6:]
    assert got[:3] == _call(reward, COMPLETIONS)[:3]
    assert metrics["ebft/dropped_groups"] == [1]
    assert set(metrics) == {"ebft/dropped_groups", "ebft/alignment", "ebft/diversity", "ebft/cfm"}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"ground_truth": None}, "there is none"),
        ({"ground_truth": ["de"] * 8 + [""]}, "no ground truth"),
        ({"ground_truth": ["de"] * 8 + [None]}, "no ground truth"),
        ({"ground_truth": ["de"] * 8 + ["d"]}, "not together"),
    ],
)
def test_ground_truths_that_are_missing_are_errors(columns: dict[str, Any], message: str) -> None:
    tokenizer = letters_tokenizer()
    reward = FeatureReward(tiny_llama(tokenizer), tokenizer, num_generations=N)
    with pytest.raises(UserError, match=message):
        _call(reward, COMPLETIONS, **columns)


@pytest.mark.parametrize("n", [2, 4])
def test_a_split_group_is_an_error(n: int) -> None:
    tokenizer = letters_tokenizer()
    reward = FeatureReward(tiny_llama(tokenizer), tokenizer, num_generations=n)
    with pytest.raises(UserError, match="num_generations"):
        _call(reward, COMPLETIONS)


def test_a_template_that_rewrites_the_prompt_is_refused() -> None:
    tokenizer = letters_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'gh'[messages | length - 1] }}{{ m.content }}{% endfor %}"
    )
    reward = FeatureReward(tiny_llama(tokenizer), tokenizer, num_generations=1)
    with pytest.raises(UserError, match="chat template"):
        reward([[{"role": "user", "content": "ab"}]], [""], [[6]], ground_truth=["cd"])


def _example() -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / "trl_grpo.py"
    spec = importlib.util.spec_from_file_location("trl_grpo_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_example_learns_inside_trls_trainer(tmp_path: Path) -> None:
    """Feature matching alone brings the letters into place; the share of right letters is only watched."""
    history = _example().train(60, 25, str(tmp_path))

    def mean(name: str, part: list[dict[str, float]]) -> float:
        return sum(entry[name] for entry in part) / len(part)

    assert len(history) == 60
    assert mean("ebft/cfm", history[-10:]) < 0.7 * mean("ebft/cfm", history[:10])
    right = "rewards/letters_right/mean"
    assert mean(right, history[-10:]) > mean(right, history[:10]) + 0.1
    assert all(entry["ebft/dropped_groups"] == 0 for entry in history)


def test_trl_finds_a_name_and_a_plain_function() -> None:
    from trl.trainer.utils import get_callable_name, is_async_callable

    tokenizer: PreTrainedTokenizerFast = letters_tokenizer()
    reward = FeatureReward(tiny_llama(tokenizer), tokenizer, num_generations=N)
    assert get_callable_name(reward) == "ebft_reward"
    assert not is_async_callable(reward)
