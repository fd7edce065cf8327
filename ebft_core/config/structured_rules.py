"""Rules about the vLLM server that need only the run file; `ebft_core.vllm` asks the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from urllib.parse import urlparse

from ebft_core.config.problem import Problem
from ebft_core.config.schema import RunConfig
from ebft_core.config.structured_sections import LORA_RANKS

_SHARED_LIMIT = 0.8


def _url(config: RunConfig) -> Iterator[Problem]:
    vllm = config.vllm
    if vllm.url is None:
        return
    parts = urlparse(vllm.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        yield Problem(("vllm.url",), "not the address of a server", vllm.url, "`http://host:port`")
    for key, value in (("python", vllm.python), ("gpus", vllm.gpus)):
        if value is not None:
            yield Problem(
                (f"vllm.{key}", "vllm.url"),
                "the server of `vllm.url` is run by you: its interpreter and GPUs are your choice",
                value,
                f"remove `vllm.{key}`, or `vllm.url` to let the run start the server",
            )


def _gpus(config: RunConfig) -> Iterator[Problem]:
    vllm = config.vllm
    needed = vllm.tensor_parallel_size * vllm.data_parallel_size
    if vllm.gpus is not None and (len(vllm.gpus) != needed or len(set(vllm.gpus)) != needed):
        yield Problem(
            ("vllm.gpus", "vllm.tensor_parallel_size", "vllm.data_parallel_size"),
            "the server's list of GPUs does not fit its number of GPUs",
            vllm.gpus,
            f"{needed} different indices: tensor_parallel_size {vllm.tensor_parallel_size} "
            f"x data_parallel_size {vllm.data_parallel_size}",
        )
    if vllm.colocate and vllm.gpu_memory_utilization > _SHARED_LIMIT:
        yield Problem(
            ("vllm.gpu_memory_utilization", "vllm.colocate"),
            "server and trainer share GPUs, and the server's share leaves the trainer no room",
            vllm.gpu_memory_utilization,
            f"at most {_SHARED_LIMIT} with `vllm.colocate: true`, for example 0.4",
        )


def _adapters(config: RunConfig) -> Iterator[Problem]:
    lora, wanted = config.lora, config.vllm.max_lora_rank
    if wanted is not None and wanted not in LORA_RANKS:
        yield Problem(
            ("vllm.max_lora_rank",),
            "vLLM cannot be started for this adapter rank",
            wanted,
            f"one of {', '.join(map(str, LORA_RANKS))}, or null",
        )
    if lora is None or not _served(config):
        return
    if wanted is not None and wanted < lora.r:
        yield Problem(
            ("vllm.max_lora_rank", "lora.r"),
            "the server would refuse the run's adapters: their rank is larger",
            wanted,
            f"at least {lora.r} (`lora.r`), or null: the smallest that fits is then taken",
        )
    if lora.r > LORA_RANKS[-1]:
        yield Problem(("lora.r",), "vLLM serves no adapter of this rank", lora.r, f"≤ {LORA_RANKS[-1]}")
    if lora.use_dora:
        yield Problem(
            ("lora.use_dora", "rollout.use_vllm"),
            "vLLM does not serve DoRA adapters",
            True,
            "`lora.use_dora: false`, or `rollout.use_vllm: false`",
        )


def _server_times(config: RunConfig) -> Iterator[Problem]:
    vllm = config.vllm
    if vllm.hang_timeout <= vllm.health_interval:
        yield Problem(
            ("vllm.hang_timeout", "vllm.health_interval"),
            "a server would count as hung before anybody looked at it",
            vllm.hang_timeout,
            f"more than {vllm.health_interval:g} seconds (`vllm.health_interval`)",
        )


def _server_length(config: RunConfig) -> Iterator[Problem]:
    length, completion = config.vllm.max_model_len, config.ebft.max_completion_length
    if length is not None and length <= completion:
        yield Problem(
            ("vllm.max_model_len", "ebft.max_completion_length"),
            "the server's context has no room for a prompt",
            length,
            f"more than {completion} tokens (`ebft.max_completion_length`)",
        )


def _strided_only_knows(config: RunConfig) -> Iterator[Problem]:
    """Keys that strided mode would ignore."""
    ebft = config.ebft
    if ebft.mode != "strided":
        return
    off = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "mask_truncated_completions": False}
    for key, value in off.items():
        if getattr(ebft, key) != value:
            yield Problem(
                (f"ebft.{key}", "ebft.mode"),
                f"`{key}` belongs to structured mode",
                getattr(ebft, key),
                f"{value}, or `ebft.mode: structured`",
            )
    if config.rewards:
        yield Problem(
            ("rewards", "ebft.mode"),
            "rewards of your own judge whole completions, and strided mode has none",
            [reward.module for reward in config.rewards],
            "`ebft.mode: structured`, or no `rewards`",
        )


def _schedule(config: RunConfig) -> Iterator[Problem]:
    """Who may run ahead of whom."""
    rollout = config.rollout
    if config.ebft.mode != "structured":
        return
    if rollout.prefetch_depth > 0 and not rollout.use_vllm:
        yield Problem(
            ("rollout.prefetch_depth", "rollout.use_vllm"),
            "completions are written by the model that is being trained: nothing can run ahead of it",
            rollout.prefetch_depth,
            "0, or `rollout.use_vllm: true`",
        )
    if rollout.prefetch_depth > 0 and config.lora is None:
        yield Problem(
            ("rollout.prefetch_depth", "lora"),
            "without adapters all weights of the server are replaced, and nothing may be under way then",
            rollout.prefetch_depth,
            "0, or adapters (`lora`)",
        )
    needed = rollout.planned_staleness
    if rollout.max_staleness is not None and rollout.max_staleness < needed:
        yield Problem(
            (
                "rollout.max_staleness",
                "rollout.prefetch_depth",
                "rollout.num_iterations",
                "rollout.sync_interval",
            ),
            "every batch written ahead would be too old when its turn comes",
            rollout.max_staleness,
            f"at least {needed} = prefetch_depth {rollout.prefetch_depth} "
            f"x num_iterations {rollout.num_iterations} + sync_interval {rollout.sync_interval} - 1",
        )


def _scale(config: RunConfig) -> Iterator[Problem]:
    if config.ebft.scale_rewards != "none" and config.ebft.advantage_estimator == "group_norm":
        yield Problem(
            ("ebft.scale_rewards", "ebft.advantage_estimator"),
            "`group_norm` divides by the spread of the rewards already",
            config.ebft.scale_rewards,
            "none, or `ebft.advantage_estimator: rloo`",
        )


def _served(config: RunConfig) -> bool:
    return config.ebft.mode == "structured" and config.rollout.use_vllm


STRUCTURED_RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    _url,
    _gpus,
    _adapters,
    _server_times,
    _server_length,
    _strided_only_knows,
    _schedule,
    _scale,
)
