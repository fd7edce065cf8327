"""The section `evaluate` of a run file: what is measured on held-out rows, and what with."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ebft_core.config.section import NonNegativeInt, PositiveInt, Section, Seed
from ebft_core.config.tasks_section import SandboxConfig, TaskConfig

ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class EvaluateConfig(Section):
    """The comparison of base and tuned model on held-out rows."""

    max_rows: PositiveInt = 64
    """Held-out rows evaluated."""
    n_samples: PositiveInt = 4
    """Samples per anchor in the evaluation."""
    batch_rows: PositiveInt = 4
    """Rows per forward pass."""
    bootstrap_samples: PositiveInt = 2000
    """Resamples of the paired bootstrap (over documents)."""
    confidence: float = Field(default=0.95, gt=0.0, lt=1.0)
    """Coverage of the reported intervals."""
    sample_rollouts: NonNegativeInt = 8
    """Rollouts shown beside the ground truth in the report."""
    seed: Seed = 1234
    """Seed of the evaluation's rollouts: the same for every model."""
    against: dict[ModelName, str] = Field(default_factory=dict)
    """Further models, name → folder: measured on the same rows, and each compared with the tuned model."""
    heldout: str | None = None
    """Folder of frozen held-out rows, measured on in place of the run's own; made with the same tokenizer."""
    feature_model: str | None = None
    """Folder of the model whose features measure; unset: the run's base model."""
    tasks: list[TaskConfig] = Field(default_factory=list)
    """What else the models are asked to do, before and after training (docs, *Downstream evaluation*)."""
    sandbox: SandboxConfig = SandboxConfig()
