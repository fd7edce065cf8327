"""The section `promotion` of a run file: when a new model becomes the champion."""

from __future__ import annotations

from pydantic import Field

from ebft_core.config.section import NonNegative, Section


class PromotionConfig(Section):
    """The gate between challenger and champion. It compares with the base and with the present champion.

    No key has an effect on the training: the gate judges what a run has measured.
    """

    metric: str = "cfm"
    """Metric of the evaluation in which the challenger must be better than each of them."""
    margin: NonNegative = 0.0
    """By how much, in the metric's unit: the whole interval of the difference must lie beyond it."""
    guards: dict[str, NonNegative] = Field(default={"ce": 0.05, "duplicate_rate": 0.05})
    """Metric → largest worsening tolerated, in the metric's unit, at the bad end of the interval."""
    require_approval: bool = False
    """A model that passed waits for a person in the Prefect UI."""
    approval_timeout_hours: float = Field(default=72.0, gt=0.0)
    """Without an answer for so long it is refused."""
    champion_alias: str = Field(default="champion", pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")
    """Alias of the champion in the registry."""
