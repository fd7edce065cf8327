"""The section `health` of a run file: when training looks ill, and whether the run then stops."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ebft_core.config.section import Fraction, NonNegative, PositiveInt, Section

Ailment = Literal["collapse", "no_signal", "divergence", "stale_policy", "duplicates", "server"]


class HealthConfig(Section):
    """Rules over the training metrics. They warn, and stop the run only where `stop_on` says so.

    No key has an effect on results: a stopped training has no output, and one that ends has computed the
    same numbers. So `--set health.stop_on=[]` goes on from the checkpoint of a stopped run.
    """

    enabled: bool = True
    """Watch the metrics of training and warn, once per episode."""
    stop_on: list[Ailment] = Field(default_factory=list)
    """Ailments that end the run (exit code 78, checkpoint kept) instead of only being reported."""
    window: PositiveInt = 10
    """Steps in a row for which a value must be out of its range, and length of the running means."""
    min_entropy: NonNegative = 0.01
    """`collapse`: an `ebft/entropy` below this."""
    max_diversity: float = 1.0
    """`collapse`: an `ebft/diversity` above this, where features are whitened (raw ones are always alike)."""
    min_advantage_std: NonNegative = 1e-6
    """`no_signal`: an `ebft/advantage_std` below this."""
    max_zero_advantage_rate: Fraction = 0.99
    """`no_signal`: an `ebft/zero_advantage_rate` above this."""
    max_grad_norm: float = Field(default=10.0, gt=0.0)
    """`divergence`: a `train/grad_norm` (before clipping) above this, in `grad_norm_steps` of `window`."""
    grad_norm_steps: PositiveInt = 3
    """Steps with such a gradient that make an ailment."""
    cfm_rise: float = Field(default=0.25, gt=0.0)
    """`divergence`: the running mean of `ebft/cfm` is this share above the run's best one, and the rise is
    larger than five of its standard errors."""
    duplicate_rise: Fraction = 0.2
    """`duplicates`: the running mean of `ebft/duplicate_rate` is this much above the run's lowest one."""
    min_effective_sample_size: Fraction = 0.3
    """`stale_policy`: a `rollout/effective_sample_size` below this."""
