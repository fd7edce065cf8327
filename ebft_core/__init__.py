"""Energy-Based Fine-Tuning: the algorithm, its trainer and the stage programs.

The names below are the library for one's own loops; torch is imported when one of them is touched.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebft_core.advantages import group_advantages
    from ebft_core.features import extract_features
    from ebft_core.geometry import place_anchors
    from ebft_core.logprobs import packed_logprobs
    from ebft_core.rewards import RewardOutput, group_rewards
    from ebft_core.samplers.strided import rollout

__all__ = [
    "RewardOutput",
    "extract_features",
    "group_advantages",
    "group_rewards",
    "packed_logprobs",
    "place_anchors",
    "rollout",
]

_HOMES = {
    "RewardOutput": "ebft_core.rewards",
    "extract_features": "ebft_core.features",
    "group_advantages": "ebft_core.advantages",
    "group_rewards": "ebft_core.rewards",
    "packed_logprobs": "ebft_core.logprobs",
    "place_anchors": "ebft_core.geometry",
    "rollout": "ebft_core.samplers.strided",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ebft_core' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
