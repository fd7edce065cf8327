"""Requests and configurations for the samplers' tests."""

from __future__ import annotations

from typing import Any

from ebft_core.config import RunConfig, parse_config
from ebft_core.samplers.prompts import PromptRequest, Turn

NEVER = 10_000
"""A stop token that no test model has."""


def sampling_config(*, rollout: dict[str, Any] | None = None, **ebft: Any) -> RunConfig:
    """A run whose sampling parameters are these."""
    return parse_config(
        {
            "model": {"name_or_path": "unused"},
            "data": {
                "sources": [{"path": "unused.txt"}],
                "sequence_length": 64,
                "transform": "prompt_completion",
            },
            "ebft": {"mode": "structured", "max_completion_length": 32, **ebft},
            "rollout": rollout or {},
        },
        origin="test",
    )


def request(
    row_id: int, prompt: list[int], *, length: int = 6, given: list[list[int]] | None = None
) -> PromptRequest:
    """A prompt; `given` makes further turns."""
    turns = [Turn([], 4), *(Turn(ids, 4) for ids in given or [])]
    return PromptRequest(row_id, prompt, turns, length)
