"""The section `sft` of a run file: supervised training before EBFT."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ebft_core.config.section import NonNegative, PositiveInt, Section, Seed


class SFTConfig(Section):
    """The warm start: supervised training on the run's rows, before EBFT. `sft: null` leaves it out."""

    use_lora: bool = True
    """Train adapters as section `lora` says, and merge them. Off, or with `lora: null`: every weight."""
    max_steps: PositiveInt | None = None
    """Optimiser steps. At most one of `max_steps`, `num_train_epochs` and `max_seconds`; none: one epoch."""
    num_train_epochs: float | None = Field(default=None, gt=0.0)
    """Passes over the training rows."""
    max_seconds: float | None = Field(default=None, gt=0.0)
    """Budget of training time, as `trainer.max_seconds`."""
    learning_rate: float = Field(default=1e-5, gt=0.0)
    """Peak learning rate."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the learning rate after warmup."""
    warmup_ratio: float = Field(default=0.03, ge=0.0, le=1.0)
    """Share of the training spent warming up."""
    weight_decay: NonNegative = 0.0
    """AdamW weight decay."""
    micro_batch_size: PositiveInt = 4
    """Rows per forward pass."""
    batch_size: PositiveInt = 16
    """Rows per optimiser step, a multiple of `micro_batch_size`."""
    save_every: PositiveInt = 50
    """Steps between checkpoints."""
    seed: Seed = 0
    """Seed of the order of rows, of dropout and of initial adapters."""
