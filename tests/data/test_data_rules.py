"""Rules between `ebft.mode` and the keys of `data`: each one broken alone, with the keys it names."""

from __future__ import annotations

from typing import Any

import pytest

from ebft_core.config import RunConfig
from ebft_core.config.rules import Problem, broken_rules
from ebft_core.config.schema import OwnRewardConfig
from tests.data.builders import run_config, structured


def problems(config: RunConfig) -> list[Problem]:
    """What the rules say, but for the mode itself."""
    return [problem for problem in broken_rules(config) if problem.keys[0] != "ebft.mode"]


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        ({"transform": "text"}, ("data.transform", "ebft.mode")),
        ({"transform": "chat", "packing": True}, ("data.packing", "ebft.mode")),
        (
            {"transform": "chat", "chat": {"assistant_turns": "final"}},
            ("data.chat.assistant_turns", "ebft.mode"),
        ),
        (
            {"transform": "prompt_completion", "thinking": "reasoning_field"},
            ("data.thinking", "data.transform"),
        ),
        (
            {"transform": "prompt_completion", "fields": {"extra": ["a"]}},
            ("data.fields.extra", "rewards", "ebft.mode"),
        ),
        ({"transform": "prompt_completion", "sequence_length": 1}, ("data.sequence_length",)),
    ],
)
def test_structured_mode_refuses(data: dict[str, Any], keys: tuple[str, ...]) -> None:
    (problem,) = problems(structured(["a.jsonl"], **data))
    assert problem.keys == keys


@pytest.mark.parametrize(
    "data",
    [
        {"transform": "chat", "chat": {"examples": "every_turn"}, "thinking": "reasoning_field"},
        {"transform": "prompt_completion", "thinking": "answer_only", "sequence_length": 2},
        {"transform": "my.module:function", "thinking": "reasoning_field"},
    ],
)
def test_structured_mode_accepts(data: dict[str, Any]) -> None:
    assert problems(structured(["a.jsonl"], **data)) == []


def test_columns_for_rewards_need_rewards() -> None:
    config = structured(["a.jsonl"], transform="prompt_completion", fields={"extra": ["a"]})
    rewards = [OwnRewardConfig(module="m:f")]
    assert problems(config.model_copy(update={"rewards": rewards})) == []


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"transform": "chat", "chat": {"examples": "first_turn"}}, "data.chat.examples"),
        ({"transform": "text", "thinking": "answer_only"}, "data.thinking"),
    ],
)
def test_strided_mode_refuses(data: dict[str, Any], key: str) -> None:
    config = run_config(["a.jsonl"])
    changed = structured(["a.jsonl"], **data).model_copy(update={"ebft": config.ebft})
    assert [problem.keys[0] for problem in problems(changed)] == [key]
