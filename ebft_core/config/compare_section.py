"""The sections `compare` and `sweep` of a run file: several trainings of one run file side by side."""

from __future__ import annotations

from pydantic import Field

from ebft_core.config.section import PositiveInt, Section

GridValue = bool | int | float | str | list[float] | list[str] | None
"""A value that a grid may give to a key."""


class CompareConfig(Section):
    """What `ebft compare` puts side by side (docs, *Compare and sweep*). It shapes no run of its own."""

    arms: list[str] = Field(default=["base", "sft", "ebft", "ebft+ce"], min_length=1)
    """Which of the arms `base`, `sft`, `ebft`, `ebft+ce` and `sft+ebft`; the base is always measured."""
    ce_coef: float = Field(default=0.1, gt=0.0)
    """`ebft.ce_coef` of the arm `ebft+ce` where the run's own is 0."""
    metric: str = "cfm"
    """Metric of the evaluation by which the best arm is chosen and the question answered."""


class SweepConfig(Section):
    """What `ebft sweep` varies: one training for every combination of the grid's values."""

    grid: dict[str, list[GridValue]] = Field(default_factory=dict)
    """Key of the run file → its values, for example `ebft.ce_coef: [0, 0.1]`. `--grid` replaces it."""
    metric: str = "cfm"
    """Metric of the evaluation by which the best combination is chosen."""
    parallel: PositiveInt | None = None
    """Trainings at a time; unset: the size of Prefect's limit `ebft-accelerator`, or 1 if there is none."""
