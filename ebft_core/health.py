"""Is training well? Rules over the stream of step metrics, from the ranges in `docs/metrics.md`.

A rule is fed one step after the other and says what is wrong while it is. The monitor turns that into
episodes: one warning when an episode begins, and another only after the values were well for a whole
window. Knows neither torch nor trainers; the same metrics in the same order give the same warnings.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, variance
from typing import Protocol

from ebft_core.config import RunConfig
from ebft_core.config.health_section import Ailment, HealthConfig
from ebft_core.errors import UserError

SIGNIFICANCE = 5.0
"""Standard errors between two running means that make a trend. The lowest of many means is low by chance, so
the usual two or three would warn in most long runs."""


@dataclass(frozen=True)
class Finding:
    """The beginning of an episode.

    Args:
        ailment: its name, as `health.stop_on` takes it.
        step: the optimiser step at which the rule first held.
        numbers: what was measured, against which bound.
        fix: configuration keys to change.
    """

    ailment: Ailment
    step: int
    numbers: str
    fix: str

    @property
    def text(self) -> str:
        """One line for people."""
        return f"{self.ailment.replace('_', ' ')} at step {self.step}: {self.numbers}; {self.fix}"

    def to_error(self) -> UserError:
        """The end of a run that was told to stop."""
        return UserError(
            f"training was stopped by health.stop_on: {self.ailment.replace('_', ' ')}",
            where=f"health.stop_on: {self.ailment}",
            value=f"step {self.step}: {self.numbers}",
            expected="training metrics inside the ranges of section health",
            hint=f"{self.fix}. The checkpoint is kept: --set health.stop_on=[] goes on from it",
        )


class Rule(Protocol):
    """Takes the metrics of one step; returns the numbers of an ailment while it lasts."""

    ailment: Ailment
    fix: str

    def feed(self, values: Mapping[str, float]) -> str | None:
        """What is wrong now; None: nothing, or the step does not have the metric."""


@dataclass
class Level:
    """A metric out of its range in at least `needed` of the last `window` steps."""

    ailment: Ailment
    fix: str
    metric: str
    bad: Callable[[float], bool]
    bound: str
    needed: int
    window: int
    _recent: deque[float] = field(default_factory=deque)

    def feed(self, values: Mapping[str, float]) -> str | None:
        """As `Rule.feed`."""
        if self.metric not in values:
            return None
        self._recent.append(values[self.metric])
        if len(self._recent) > self.window:
            self._recent.popleft()
        bad = [value for value in self._recent if self.bad(value)]
        if len(bad) < self.needed:
            return None
        often = "" if self.needed == 1 else f" in {len(bad)} of the last {len(self._recent)} steps"
        return f"{self.metric} {bad[-1]:.4g} ({self.bound}){often}"


@dataclass
class Rise:
    """The running mean of a metric far above the lowest one of the run."""

    ailment: Ailment
    fix: str
    metric: str
    margin: Callable[[float], float]
    window: int
    _recent: deque[float] = field(default_factory=deque)
    _best: float = math.inf
    _variances: float = 0.0
    _windows: int = 0

    def feed(self, values: Mapping[str, float]) -> str | None:
        """As `Rule.feed`."""
        value = values.get(self.metric, math.nan)
        if not math.isfinite(value):
            return None
        self._recent.append(value)
        if len(self._recent) < max(self.window, 2):
            return None
        now, length = fmean(self._recent), len(self._recent)
        self._variances += variance(self._recent)
        self._windows += 1
        self._recent.popleft()
        self._best = min(self._best, now)
        noise = SIGNIFICANCE * math.sqrt(2 * self._variances / self._windows / length)
        if now - self._best <= max(self.margin(self._best), noise):
            return None
        return f"{self.metric} {now:.4g} on average over {length} steps, its best was {self._best:.4g}"


class HealthMonitor:
    """Feeds the rules and keeps the episodes.

    Args:
        config: the run; section `health`, and the keys that decide which rules make sense.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config.health
        self._rules = make_rules(config)
        self._open: dict[int, Finding] = {}
        self._calm: dict[int, int] = {}

    def observe(self, step: int, values: Mapping[str, float]) -> list[Finding]:
        """The episodes that begin with this step."""
        begun = []
        for number, rule in enumerate(self._rules):
            numbers = rule.feed(values)
            if numbers is None:
                self._note_calm(number)
                continue
            self._calm[number] = 0
            if number not in self._open:
                self._open[number] = Finding(rule.ailment, step, numbers, rule.fix)
                begun.append(self._open[number])
        return begun

    @property
    def to_stop(self) -> Finding | None:
        """The episode that is going on and ends the run, as `health.stop_on` has it."""
        return next((f for f in self._open.values() if f.ailment in self._config.stop_on), None)

    def _note_calm(self, number: int) -> None:
        self._calm[number] = self._calm.get(number, 0) + 1
        if self._calm[number] >= 2 * self._config.window:  # the first window still holds bad values
            self._open.pop(number, None)


def make_rules(config: RunConfig) -> list[Rule]:
    """The rules that make sense for the run."""
    health = config.health
    rules = [*_collapse(config), *_no_signal(health), *_divergence(health)]
    rules.append(
        Rise(
            "duplicates",
            "raise ebft.diversity_coef or ebft.temperature, or lower trainer.learning_rate",
            "ebft/duplicate_rate",
            lambda _: health.duplicate_rise,
            health.window,
        )
    )
    return [*rules, *_structured(config)] if config.ebft.mode == "structured" else rules


def _collapse(config: RunConfig) -> list[Rule]:
    health = config.health
    fix = "raise ebft.diversity_coef or ebft.temperature, or lower trainer.learning_rate"
    entropy = Level(
        "collapse",
        fix,
        "ebft/entropy",
        # Exactly 0 is a step without any computed position (all groups without a signal): not an entropy.
        lambda value: 0.0 < value < health.min_entropy,
        f"below {health.min_entropy:g}",
        health.window,
        health.window,
    )
    diversity = Level(
        "collapse",
        fix,
        "ebft/diversity",
        lambda value: value > health.max_diversity,
        f"above {health.max_diversity:g}",
        health.window,
        health.window,
    )
    return [entropy] if config.ebft.whitening == "none" else [entropy, diversity]


def _no_signal(health: HealthConfig) -> list[Rule]:
    fix = "raise ebft.temperature or ebft.n_samples_per_prompt: the samples of a group are all alike"
    return [
        Level(
            "no_signal",
            fix,
            "ebft/zero_advantage_rate",
            lambda value: value > health.max_zero_advantage_rate,
            f"above {health.max_zero_advantage_rate:g}",
            health.window,
            health.window,
        ),
        Level(
            "no_signal",
            fix,
            "ebft/advantage_std",
            lambda value: value < health.min_advantage_std,
            f"below {health.min_advantage_std:g}",
            health.window,
            health.window,
        ),
    ]


def _divergence(health: HealthConfig) -> list[Rule]:
    fix = "lower trainer.learning_rate, or set ebft.kl_coef or ebft.ce_coef"
    numbers: list[Rule] = [
        Level("divergence", fix, metric, lambda value: not math.isfinite(value), "not a finite number", 1, 1)
        for metric in ("train/loss", "train/grad_norm")
    ]
    return [
        *numbers,
        Level(
            "divergence",
            fix,
            "train/grad_norm",
            lambda value: value > health.max_grad_norm,
            f"above {health.max_grad_norm:g}",
            min(health.grad_norm_steps, health.window),
            health.window,
        ),
        Rise("divergence", fix, "ebft/cfm", lambda best: health.cfm_rise * abs(best), health.window),
    ]


def _structured(config: RunConfig) -> list[Rule]:
    health, bound = config.health, config.rollout.staleness_bound
    stale = "lower rollout.prefetch_depth, rollout.num_iterations or rollout.sync_interval"
    return [
        Level(
            "stale_policy",
            stale,
            "policy_lag",
            lambda value: value > bound,
            f"above rollout.max_staleness = {bound}",
            1,
            1,
        ),
        Level(
            "stale_policy",
            stale,
            "rollout/effective_sample_size",
            lambda value: value < health.min_effective_sample_size,
            f"below {health.min_effective_sample_size:g}",
            health.window,
            health.window,
        ),
        Level(
            "server",
            "see vllm/server.log of the run; raise rollout.request_timeout or rollout.request_attempts",
            "rollout/failed_prompts",
            lambda value: value > 0,
            "prompts without completions",
            1,
            1,
        ),
    ]
