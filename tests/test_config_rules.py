"""Rules that relate several keys: each one broken alone, with the key it points at; and its border."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from ebft_core.config import parse_config
from ebft_core.config.loading import config_advice
from ebft_core.errors import UserErrors

SCRATCH = {"model.name_or_path": None, "model.from_scratch": {"sources": ["stdlib:*.py"]}}
STRUCTURED = {"ebft.mode": "structured", "data.transform": "prompt_completion"}

BROKEN: list[tuple[str, dict[str, Any], str, str]] = [
    # name, changes to the valid file below, key the error points at, part of what it says
    ("no model", {"model.name_or_path": None}, "model", "no base model"),
    ("two models", {"model.from_scratch": {"sources": ["a"]}}, "model.name_or_path", "two base models"),
    ("empty model", {"model.name_or_path": " "}, "model.name_or_path", "is empty"),
    ("revision of nothing", {**SCRATCH, "model.revision": "main"}, "model.revision", "hub model"),
    (
        "heads do not divide the width",
        {**SCRATCH, "model.from_scratch.num_attention_heads": 5, "model.from_scratch.num_key_value_heads": 5},
        "model.from_scratch.hidden_size",
        "divided among the heads",
    ),
    (
        "odd width per head",
        {**SCRATCH, "model.from_scratch.hidden_size": 18, "model.from_scratch.num_attention_heads": 6},
        "model.from_scratch.hidden_size",
        "even width",
    ),
    (
        "key/value heads",
        {**SCRATCH, "model.from_scratch.num_key_value_heads": 4},
        "model.from_scratch.num_key_value_heads",
        "shared among",
    ),
    (
        "positions, by data",
        {**SCRATCH, "data.sequence_length": 2049},
        "model.from_scratch.max_position_embeddings",
        "rows as long",
    ),
    (
        "positions, by its own training",
        {**SCRATCH, "model.from_scratch.sequence_length": 2049},
        "model.from_scratch.max_position_embeddings",
        "rows as long",
    ),
    (
        "tiny BPE",
        {**SCRATCH, "model.from_scratch.tokenizer": "bpe", "model.from_scratch.vocab_size": 257},
        "model.from_scratch.vocab_size",
        "too small",
    ),
    ("no chat template", {**SCRATCH, "data.transform": "chat"}, "model.chat_template", "chat template"),
    ("unknown transform", {"data.transform": "txt"}, "data.transform", "no such transform"),
    ("half a function", {"data.transform": "module:"}, "data.transform", "no such transform"),
    ("empty path", {"data.sources": [{"path": "a"}, {"path": ""}]}, "data.sources[1].path", "is empty"),
    (
        "revision of a file",
        {"data.sources": [{"path": "a", "revision": "x"}]},
        "data.sources[0].revision",
        "hub",
    ),
    ("row too short", {"ebft.context_length": 1017}, "ebft.context_length", "long enough"),
    ("row too short", {"ebft.min_completion_prefix": 1017}, "ebft.min_completion_prefix", "long enough"),
    ("block longer than a row", {"ebft.generate_max_len": 1017}, "ebft.context_length", "long enough"),
    ("strided, top_k", {"ebft.top_k": 20}, "ebft.top_k", "belongs to structured mode"),
    ("strided, min_p", {"ebft.min_p": 0.05}, "ebft.min_p", "belongs to structured mode"),
    (
        "strided, repetition penalty",
        {"ebft.repetition_penalty": 1.1},
        "ebft.repetition_penalty",
        "belongs to structured mode",
    ),
    (
        "strided, truncated completions",
        {"ebft.mask_truncated_completions": True},
        "ebft.mask_truncated_completions",
        "belongs to structured mode",
    ),
    ("strided, own rewards", {"rewards": [{"module": "m:f"}]}, "rewards", "strided mode has none"),
    (
        "ahead of itself",
        {**STRUCTURED, "rollout.use_vllm": False, "rollout.prefetch_depth": 1},
        "rollout.prefetch_depth",
        "nothing can run ahead",
    ),
    (
        "ahead of a restart",
        {**STRUCTURED, "lora": None, "rollout.prefetch_depth": 1},
        "rollout.prefetch_depth",
        "all weights of the server are replaced",
    ),
    (
        "staleness below the prefetch",
        {**STRUCTURED, "rollout.prefetch_depth": 2, "rollout.max_staleness": 1},
        "rollout.max_staleness",
        "too old",
    ),
    (
        "staleness below the sync interval",
        {**STRUCTURED, "rollout.sync_interval": 3, "rollout.max_staleness": 1},
        "rollout.max_staleness",
        "too old",
    ),
    (
        "staleness below the steps of a batch",
        {
            **STRUCTURED,
            "rollout.prefetch_depth": 1,
            "rollout.num_iterations": 2,
            "rollout.max_staleness": 1,
        },
        "rollout.max_staleness",
        "too old",
    ),
    (
        "scaled twice",
        {"ebft.scale_rewards": "group", "ebft.advantage_estimator": "group_norm"},
        "ebft.scale_rewards",
        "divides by the spread",
    ),
    (
        "N = 1, rloo",
        {"ebft.n_samples_per_prompt": 1, "ebft.diversity_coef": 0},
        "ebft.n_samples_per_prompt",
        "`rloo`",
    ),
    (
        "N = 1, group_norm",
        {"ebft.n_samples_per_prompt": 1, "ebft.diversity_coef": 0, "ebft.advantage_estimator": "group_norm"},
        "ebft.n_samples_per_prompt",
        "`group_norm`",
    ),
    (
        "N = 1, diversity",
        {"ebft.n_samples_per_prompt": 1, "ebft.advantage_estimator": "reinforce"},
        "ebft.diversity_coef",
        "single sample",
    ),
    ("one evaluation sample", {"evaluate.n_samples": 1}, "evaluate.n_samples", "unbiased CFM"),
    ("no loss", {"ebft.rl_coef": 0, "ebft.kl_coef": 0.1}, "ebft.rl_coef", "nothing is learned"),
    ("no reward", {"ebft.alignment_coef": 0, "ebft.diversity_coef": 0}, "ebft.alignment_coef", "always 0"),
    ("batch", {"trainer.batch_size": 3, "trainer.micro_batch_size": 2}, "trainer.batch_size", "divided"),
    (
        "accumulation",
        {"trainer.batch_size": 8, "trainer.micro_batch_size": 2, "trainer.gradient_accumulation_steps": 2},
        "trainer.batch_size",
        "disagrees",
    ),
    ("length twice", {"trainer.max_steps": 1, "trainer.num_train_epochs": 1}, "trainer.max_steps", "twice"),
    (
        "flex on CPU",
        {"trainer.attention": "flex", "trainer.device": "cpu"},
        "trainer.attention",
        "no backward",
    ),
    ("no target", {"lora.target_modules": []}, "lora.target_modules", "no target"),
    ("empty target", {"lora.target_modules": ""}, "lora.target_modules", "no target"),
    ("bad regex", {"lora.target_modules": "(q_proj"}, "lora.target_modules", "not a regular expression"),
    ("feature device", {"ebft.feature_device": "cpu"}, "ebft.feature_device", "no device of its own"),
    ("remote workspace", {"workspace": "gs://bucket/x"}, "workspace", "kind of workspace"),
    ("credentials in it", {"workspace": "s3://key:word@bucket"}, "workspace", "kind of workspace"),
    ("empty workspace", {"workspace": ""}, "workspace", "kind of workspace"),
    ("file store", {"tracking.mlflow_uri": "file:///runs"}, "tracking.mlflow_uri", "plain folders"),
    ("bare folder", {"tracking.mlflow_uri": "./mlruns"}, "tracking.mlflow_uri", "plain folders"),
]

ALLOWED: list[dict[str, Any]] = [
    {},
    {**SCRATCH, "data.sequence_length": 2048},
    {**SCRATCH, "model.from_scratch.num_key_value_heads": 2},
    {**SCRATCH, "data.transform": "chat", "model.chat_template": "chat.jinja"},
    {**SCRATCH, "model.from_scratch.tokenizer": "bpe", "model.from_scratch.vocab_size": 258},
    {"model.revision": "main", "model.trust_remote_code": True},
    {"data.transform": "package.module:function"},
    {"data.sources": [{"path": "a/b", "format": "hub", "revision": "x"}]},
    {"ebft.context_length": 1016, "ebft.min_completion_prefix": 1016},
    {"ebft.n_samples_per_prompt": 1, "ebft.advantage_estimator": "reinforce", "ebft.diversity_coef": 0},
    {"ebft.n_samples_per_prompt": 2},
    {"ebft.rl_coef": 0, "ebft.ce_coef": 0.1, "ebft.alignment_coef": 0, "ebft.diversity_coef": 0},
    {"ebft.alignment_coef": 0},
    {"trainer.batch_size": 8, "trainer.micro_batch_size": 2, "trainer.gradient_accumulation_steps": 4},
    {"trainer.micro_batch_size": 2, "trainer.gradient_accumulation_steps": 3},
    {"trainer.max_steps": 1},
    {"trainer.num_train_epochs": 0.5},
    {"trainer.attention": "flex"},
    {"lora.target_modules": r".*\.(q|k)_proj"},
    {"lora": None, "ebft.feature_device": "cuda:1"},
    {"vllm": {}},
    {"ebft.top_k": 0, "ebft.min_p": 0.0, "ebft.repetition_penalty": 1.0, "rewards": []},
    {
        **STRUCTURED,
        "ebft.top_k": 20,
        "ebft.min_p": 0.05,
        "ebft.repetition_penalty": 1.1,
        "ebft.mask_truncated_completions": True,
        "rewards": [{"module": "m:f"}],
    },
    {**STRUCTURED, "rollout.use_vllm": False},
    {**STRUCTURED, "lora": None, "rollout.sync_interval": 16},
    {**STRUCTURED, "rollout.prefetch_depth": 2, "rollout.sync_interval": 2, "rollout.max_staleness": 3},
    {"rollout.prefetch_depth": 1, "rollout.max_staleness": 0},  # strided mode reads neither
    {"ebft.scale_rewards": "batch"},
    {"ebft.scale_rewards": "none", "ebft.advantage_estimator": "group_norm"},
    {"tracking.mlflow_uri": "sqlite:////tmp/mlflow.db"},
    {"tracking.mlflow_uri": "http://localhost:5000"},
    {"tracking.mlflow_uri": "databricks"},
]


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """The smallest valid file with some keys set by dotted path."""
    data: dict[str, Any] = {"model": {"name_or_path": "some/model"}, "data": {"sources": [{"path": "a.txt"}]}}
    for path, value in copy.deepcopy(changes).items():
        *sections, key = path.split(".")
        here = data
        for section in sections:
            here = here.setdefault(section, {})
        here[key] = value
    return data


@pytest.mark.parametrize(
    ("changes", "where", "what"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN]
)
def test_a_broken_rule_is_the_one_error(changes: dict[str, Any], where: str, what: str) -> None:
    with pytest.raises(UserErrors) as caught:
        parse_config(changed(changes))
    (error,) = caught.value.errors
    assert error.where == where
    assert what in error.what
    assert error.expected


@pytest.mark.parametrize("changes", ALLOWED, ids=str)
def test_what_is_allowed(changes: dict[str, Any]) -> None:
    parse_config(changed(changes))


def test_all_broken_rules_are_reported() -> None:
    changes = {
        "trainer.batch_size": 3,
        "trainer.micro_batch_size": 2,
        "ebft.mode": "structured",
        "workspace": "",
    }
    with pytest.raises(UserErrors) as caught:
        parse_config(changed(changes))
    assert {error.where for error in caught.value.errors} == {
        "trainer.batch_size",
        "data.transform",
        "workspace",
    }


def test_the_staleness_that_a_run_is_given_is_the_one_its_rule_asks_for() -> None:
    ahead = {
        **STRUCTURED,
        "rollout.prefetch_depth": 2,
        "rollout.sync_interval": 3,
        "rollout.num_iterations": 2,
    }
    bound = parse_config(changed(ahead)).rollout.staleness_bound
    assert bound == 6  # a batch written two batches of two steps ago, by weights that were two steps old then
    assert parse_config(changed({**ahead, "rollout.max_staleness": bound})).rollout.staleness_bound == bound
    with pytest.raises(UserErrors, match=f"at least {bound}"):
        parse_config(changed({**ahead, "rollout.max_staleness": bound - 1}))


@pytest.mark.parametrize(
    ("rollout", "advised"),
    [({}, True), ({"sync_interval": 7}, True), ({"sync_interval": 8}, False), ({"use_vllm": False}, False)],
)
def test_frequent_restarts_of_the_server_are_advised_against(rollout: dict[str, Any], advised: bool) -> None:
    found = config_advice(parse_config(changed({**STRUCTURED, "lora": None, "rollout": rollout})))
    assert any(text.startswith("rollout.sync_interval: ") for text in found) is advised


def test_the_batch_size_gives_the_accumulation() -> None:
    trainer = parse_config(changed({"trainer.batch_size": 8, "trainer.micro_batch_size": 2})).trainer
    assert trainer.accumulation == 4
