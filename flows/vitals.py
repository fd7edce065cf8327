"""What the metrics of a training say at a glance: value, trend, and the range in which it is usually well."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, median, variance
from typing import Any, Literal

WINDOW = 20
"""Steps of a trend: the mean of their later half against that of the earlier one."""
SIGNIFICANCE = 2.0
"""Standard errors between the two halves that make an arrow."""
_FEWEST = 6

Better = Literal["higher", "lower"] | None


@dataclass(frozen=True)
class Vital:
    """A metric worth a line: its name, its direction, and its usual range, as `docs/metrics.md` has them."""

    metric: str
    label: str
    better: Better
    healthy: tuple[float, float] | None = None


VITALS = (
    Vital("ebft/reward", "reward", "higher"),
    Vital("ebft/alignment", "alignment", "higher", (0.3, 0.9)),
    Vital("ebft/cfm", "CFM", "lower"),
    Vital("ebft/ce_loss", "cross-entropy", "lower"),
    Vital("ebft/diversity", "similarity", "lower", (0.01, 0.1)),
    Vital("ebft/entropy", "entropy", None, (0.05, 0.5)),
    Vital("train/grad_norm", "gradient norm", None, (0.1, 3.0)),
    Vital("sft/loss", "loss", "lower"),
    Vital("sft/token_accuracy", "token accuracy", "higher"),
    Vital("sft/grad_norm", "gradient norm", None),
)
_GROUPS = ("perf", "sft")
"""Where a training's step times and memory stand: EBFT's, the warm start's."""
_PHASES = ("rollout", "features", "update")


@dataclass(frozen=True)
class Reading:
    """A vital with its value. `arrow` is ▲, ▼ or →; `improves` None: nobody can say."""

    vital: Vital
    value: float
    arrow: str
    improves: bool | None

    @property
    def inside(self) -> bool | None:
        """Whether the value is in its healthy range; None where there is none."""
        healthy = self.vital.healthy
        return None if healthy is None else healthy[0] <= self.value <= healthy[1]


class Vitals:
    """Follows the `metrics` events of one stage."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._history: dict[str, deque[float]] = {}
        self._left = math.nan

    def feed(self, event: Mapping[str, Any]) -> None:
        """Take the metrics of a step."""
        for name, text in event["values"].items():
            value = float(text)
            self.values[name] = value
            if math.isfinite(value):
                self._history.setdefault(name, deque(maxlen=WINDOW)).append(value)
        seconds = next((h for group in _GROUPS if (h := self._history.get(f"{group}/step_seconds"))), None)
        if event["total"] is not None and seconds is not None:
            self._left = median(seconds) * (event["total"] - event["step"])

    def readings(self) -> Iterator[Reading]:
        """The vitals that this training has."""
        for vital in VITALS:
            if vital.metric in self.values:
                arrow = trend(self._history.get(vital.metric, ()))
                improves = None
                if arrow != "→" and vital.better is not None:
                    improves = (arrow == "▲") == (vital.better == "higher")
                yield Reading(vital, self.values[vital.metric], arrow, improves)

    def pace(self) -> list[str]:
        """Speed, time left and memory."""
        parts = []
        step_seconds, memory = self._measured("step_seconds"), self._measured("peak_memory_mb")
        if step_seconds is not None:
            parts.append(f"{step_seconds:.3g} s/step")
        if math.isfinite(self._left):
            parts.append(f"{duration(self._left)} left")
        if "rollout/tokens_per_second" in self.values:
            parts.append(f"{self.values['rollout/tokens_per_second']:,.0f} tokens/s")
        if memory is not None:
            parts.append(f"{memory / 1024:.2f} GiB")
        return parts

    def shares(self) -> str:
        """How the last step's time was spent."""
        whole = self.values.get("perf/step_seconds", 0.0)
        seconds = {name: self.values.get(f"perf/{name}_seconds") for name in _PHASES}
        return ", ".join(f"{n} {s / whole:.0%}" for n, s in seconds.items() if s is not None and whole > 0)

    def _measured(self, name: str) -> float | None:
        found = (self.values.get(f"{group}/{name}") for group in _GROUPS)
        return next((value for value in found if value is not None), None)


def trend(values: deque[float] | tuple[float, ...]) -> str:
    """▲ or ▼ where the later half of the values differs from the earlier one by more than chance; else →."""
    if len(values) < _FEWEST:
        return "→"
    ordered = list(values)
    middle = len(ordered) // 2
    before, after = ordered[:middle], ordered[middle:]
    change = fmean(after) - fmean(before)
    error = math.sqrt(variance(before) / len(before) + variance(after) / len(after))
    if abs(change) <= SIGNIFICANCE * error:
        return "→"
    return "▲" if change > 0 else "▼"


def duration(seconds: float) -> str:
    """`42 s`, `7 min`, `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
