"""The promotion gate: whether measured numbers make a challenger the champion.

The challenger must be better than every reference (the base, the present champion) in one metric, and not
much worse in the guards. Each check looks at the bad end of the interval of the difference: better means that
the whole interval lies beyond the margin, harmless that none of it lies beyond the tolerance. A number that
the data do not determine passes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ebft_core.bootstrap import Interval, PairedEstimate
from ebft_core.config.promotion_section import PromotionConfig
from ebft_core.metrics import metric_of

SCHEMA = "ebft.decision/1"


@dataclass(frozen=True)
class Check:
    """One condition of the gate.

    Attributes:
        name: `primary` or `guard`.
        metric: its name in the evaluation.
        against: the reference, `base` or `champion`.
        difference, interval: challenger minus reference, in the metric's unit; NaN where not determined.
        bound: what the bad end of the interval is held against, same unit and sign as the difference. It may
            lie on a guard's bound, not on the primary metric's.
        passed: whether the condition holds.
        text: all of it as a phrase.
    """

    name: Literal["primary", "guard"]
    metric: str
    against: str
    difference: float
    interval: Interval
    bound: float
    passed: bool
    text: str


@dataclass(frozen=True)
class Decision:
    """What the gate, or a person it asked, made of the numbers. `reason` is one sentence."""

    promote: bool
    checks: tuple[Check, ...]
    reason: str

    def to_json(self) -> dict[str, Any]:
        """A JSON document; numbers that are not finite become null."""
        checks = [
            {
                **vars(check),
                "difference": _plain(check.difference),
                "interval": [_plain(end) for end in check.interval],
            }
            for check in self.checks
        ]
        return {"schema": SCHEMA, "promote": self.promote, "reason": self.reason, "checks": checks}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Decision:
        """The inverse of `to_json`.

        Raises:
            ValueError: another schema.
        """
        if document.get("schema") != SCHEMA:
            raise ValueError(f"not a decision: schema {document.get('schema')!r}, expected {SCHEMA!r}")
        checks = tuple(
            Check(
                **{
                    **check,
                    "difference": _restore(check["difference"]),
                    "interval": tuple(_restore(end) for end in check["interval"]),
                }
            )
            for check in document["checks"]
        )
        return cls(promote=document["promote"], checks=checks, reason=document["reason"])


def decide(references: Mapping[str, Mapping[str, PairedEstimate]], rules: PromotionConfig) -> Decision:
    """Judge a challenger.

    Args:
        references: `base`, and `champion` if there is one → metric → estimate whose `base` is the reference
            and whose `tuned` is the challenger.
        rules: section `promotion` of the run file.

    Raises:
        ValueError: no reference.
    """
    if not references:
        raise ValueError("nothing to compare the challenger with")
    checks = []
    for against, metrics in references.items():
        checks.append(_primary(rules.metric, against, metrics.get(rules.metric), rules.margin))
        checks += [_guard(name, against, metrics.get(name), most) for name, most in rules.guards.items()]
    failed = [check for check in checks if not check.passed]
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return Decision(False, tuple(checks), f"refused: {failed[0].text}{more}")
    names = " and ".join(references)
    better = f"better than {names} in {metric_of(rules.metric).label}"
    return Decision(True, tuple(checks), f"promoted: {better}, and no guard is broken")


def _primary(metric: str, against: str, estimate: PairedEstimate | None, margin: float) -> Check:
    """Better by more than `margin`, wherever in the interval the truth lies."""
    return _check("primary", metric, against, estimate, margin)


def _guard(metric: str, against: str, estimate: PairedEstimate | None, most: float) -> Check:
    """Worse by at most `most`, wherever in the interval the truth lies."""
    return _check("guard", metric, against, estimate, -most)


def _check(
    name: Literal["primary", "guard"],
    metric: str,
    against: str,
    estimate: PairedEstimate | None,
    least_gain: float,
) -> Check:
    lower = metric_of(metric).better == "lower"
    sign = -1.0 if lower else 1.0
    bound = sign * least_gain + 0.0  # no negative zero
    label = f"{metric_of(metric).label}, challenger minus {against}"
    if estimate is None:
        nan = (math.nan, math.nan)
        return Check(name, metric, against, math.nan, nan, bound, False, f"{label}: not measured")
    low, high = estimate.interval
    gain = sign * (high if lower else low)  # at the bad end
    if math.isfinite(low) and math.isfinite(high):
        passed = gain > least_gain if name == "primary" else gain >= least_gain
        side = "below" if lower else "above"
        said = f"{estimate.difference:+.4f}, interval [{low:+.4f}, {high:+.4f}], must lie {side} {bound:+.4f}"
    else:
        passed, said = False, f"{estimate.difference:+.4f}, an interval that the data do not determine"
    return Check(name, metric, against, estimate.difference, (low, high), bound, passed, f"{label}: {said}")


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _restore(value: float | None) -> float:
    return math.nan if value is None else value
