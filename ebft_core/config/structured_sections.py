"""The sections of a run file that only structured mode reads: `rollout`, `vllm`, `rewards`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ebft_core.config.section import Fraction, NonNegative, NonNegativeInt, PositiveInt, Section

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The adapter ranks a vLLM server can be started for."""


class RolloutConfig(Section):
    """Who generates the completions of structured mode, and how far generation may run ahead."""

    use_vllm: bool = True
    """Generate through a vLLM server. Off: in the training process (slow; needs no server)."""
    prefetch_depth: NonNegativeInt = 0
    """Batches of completions that are generated ahead while the model trains. 0: strictly on policy."""
    max_staleness: NonNegativeInt | None = None
    """Oldest weights a completion may come from, in optimiser steps; older ones are generated anew.
    Unset: `prefetch_depth` times `num_iterations`, plus `sync_interval` - 1, which a healthy run never
    exceeds."""
    sync_interval: PositiveInt = 1
    """Optimiser steps between two publications of the weights to the server."""
    is_cap: float = Field(default=2.0, gt=0.0)
    """Upper bound of the per-token importance ratio between the trainer's and the sampler's policy."""
    off_policy_mask_threshold: float | None = Field(default=None, gt=0.0)
    """Completions whose mean log-ratio to the sampler's policy exceeds this KL are left out; unset: none."""
    num_iterations: PositiveInt = 1
    """Optimiser steps taken on every batch of completions."""
    epsilon: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Clipping range of the policy ratio where completions are used more than once."""
    epsilon_high: float | None = Field(default=None, gt=0.0)
    """Upper clipping range; unset: `epsilon`."""
    skip_zero_advantage_batches: bool = True
    """Spare the forward and backward pass of a micro-batch without any learning signal."""
    replay_buffer_size: NonNegativeInt = 0
    """Groups with a signal that are kept to stand in for groups without one. 0 is off."""
    max_rerolls: NonNegativeInt = 2
    """Times a prompt whose generation failed is tried again, with a later step, before it is left out."""
    request_timeout: float = Field(default=120.0, gt=0.0)
    """Seconds one generation request may take."""
    request_attempts: PositiveInt = 4
    """Attempts of a request before the prompt counts as failed."""
    canary_tolerance: float = Field(default=0.05, gt=0.0)
    """Largest mean difference of log-probabilities between server and trainer after a weight sync."""

    @property
    def staleness_bound(self) -> int:
        """`max_staleness`, or what a run with these intervals never exceeds."""
        return self.planned_staleness if self.max_staleness is None else self.max_staleness

    @property
    def planned_staleness(self) -> int:
        """Age in optimiser steps that completions reach without any delay: a batch lasts `num_iterations`."""
        return self.prefetch_depth * self.num_iterations + self.sync_interval - 1


class VLLMConfig(Section):
    """The vLLM server of structured mode: the run starts it, watches it and ends it."""

    url: str | None = None
    """Address of a server that you run; unset: the run starts its own."""
    python: str | None = None
    """Interpreter of the environment that has vLLM; unset: `.venv-vllm/bin/python` (`make setup-vllm`)."""
    gpus: list[NonNegativeInt] | None = None
    """GPUs of the server, by index; unset: the last `tensor_parallel_size` times
    `data_parallel_size` ones."""
    colocate: bool = False
    """Let server and trainer share GPUs; then `gpu_memory_utilization` is the server's share of each."""
    gpu_memory_utilization: Fraction = 0.9
    """Share of a GPU's memory the server may take."""
    cpu_kv_cache_gb: PositiveInt = 1
    """Memory of the key/value cache where the server runs on the CPU, in GB."""
    max_model_len: PositiveInt | None = None
    """Longest prompt plus completion, in tokens; unset: `data.sequence_length` plus
    `ebft.max_completion_length`."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format of the server's weights; `auto`: the model's."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs that share one copy of the model."""
    data_parallel_size: PositiveInt = 1
    """Copies of the model."""
    enable_prefix_caching: bool = True
    """Reuse the key/value cache of prompts that start alike."""
    enforce_eager: bool = False
    """No compilation or CUDA graphs in the server: starts faster, generates slower."""
    max_lora_rank: PositiveInt | None = None
    """Largest adapter rank the server accepts; unset: the smallest it offers that holds `lora.r`."""
    startup_timeout: float = Field(default=600.0, gt=0.0)
    """Seconds until the server must answer a completion."""
    health_interval: float = Field(default=3.0, gt=0.0)
    """Seconds between two looks at the server's health."""
    hang_timeout: float = Field(default=10.0, gt=0.0)
    """Seconds without any sign of progress after which the server counts as hung."""
    max_restarts: NonNegativeInt = 3
    """Times a server that died or hangs is started anew before the run stops."""


class OwnRewardConfig(Section):
    """A reward function with TRL's `reward_funcs` signature."""

    module: str = Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")
    """`package.module:function`; called with prompts, completions and the columns of the data set."""
    weight: NonNegative = 1.0
    """Weight of the reward beside the feature reward."""
