"""Rules about the length of a training, of the warm start and of EBFT, and about the warm start's batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ebft_core.config.problem import Problem

if TYPE_CHECKING:
    from ebft_core.config.schema import RunConfig

_UNITS = {"max_steps": "steps", "num_train_epochs": "epochs", "max_seconds": "seconds"}


def _length(config: RunConfig) -> Iterator[Problem]:
    """A training ends after steps, epochs or seconds."""
    for section, part in (("trainer", config.trainer), ("sft", config.sft)):
        if part is None:
            continue
        given = part.model_dump(include=set(_UNITS), exclude_none=True)
        if len(given) > 1:
            keys = tuple(f"{section}.{name}" for name in given)
            yield Problem(
                keys,
                "the length of the training is given twice",
                " and ".join(f"{value:g} {_UNITS[name]}" for name, value in given.items()),
                "at most one of `max_steps`, `num_train_epochs` and `max_seconds`",
                f"switch the others off, for example with `--set {keys[-1]}=null`",
            )


def _warm_start_batch(config: RunConfig) -> Iterator[Problem]:
    """The warm start's rows per step are whole micro-batches."""
    sft = config.sft
    if sft is not None and sft.batch_size % sft.micro_batch_size:
        yield Problem(
            ("sft.batch_size", "sft.micro_batch_size"),
            "the batch cannot be divided into micro-batches",
            sft.batch_size,
            f"a multiple of {sft.micro_batch_size}",
        )


TRAINING_RULES = (_length, _warm_start_batch)
