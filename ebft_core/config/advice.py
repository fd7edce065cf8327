"""Settings that are allowed but probably not meant: `ebft validate` shows them, and they stop nothing."""

from __future__ import annotations

from collections.abc import Iterator

from ebft_core.config.rules import Problem
from ebft_core.config.schema import RunConfig

_FEW_STEPS = 8  # of training, against the tens of seconds that a restart of the server takes


def advice(config: RunConfig) -> Iterator[Problem]:
    """What is worth a second look in a valid configuration."""
    ebft = config.ebft
    if ebft.n_samples_per_prompt == 1 and ebft.whitening == "feature":
        yield Problem(
            ("ebft.whitening",),
            "with one sample the whitened alignment is +1 or -1 whatever was sampled; take `none`",
        )
    if ebft.n_samples_per_prompt == 2 and ebft.advantage_estimator == "rloo" and ebft.diversity_coef > 0:
        yield Problem(
            ("ebft.n_samples_per_prompt",),
            "two samples leave the diversity part of the reward without a baseline; take 3 or more",
        )
    if ebft.advantage_estimator == "reinforce" and ebft.n_samples_per_prompt > 1:
        yield Problem(
            ("ebft.advantage_estimator",),
            "`reinforce` has no baseline: its gradient is far noisier than that of `rloo`",
        )
    if config.lora is None and ebft.rl_coef > 0 and config.trainer.learning_rate > 1e-4:
        yield Problem(
            ("trainer.learning_rate",),
            "high for training every weight; the paper takes 1e-6",
        )
    served = ebft.mode == "structured" and config.rollout.use_vllm
    if served and config.lora is None and config.rollout.sync_interval < _FEW_STEPS:
        yield Problem(
            ("rollout.sync_interval",),
            "without adapters every sync restarts the server, which takes tens of seconds; take 16 or more",
        )
    if config.model.trust_remote_code:
        yield Problem(("model.trust_remote_code",), "Python code that ships with the model will be run")
