"""Arms: several trainings of one run file, made comparable.

An arm is the run file with some keys changed. All arms share model, data and evaluation, so their models are
measured on the same held-out rows; in a comparison they also share the budget. The base is an arm without a
training.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ebft_core.config import RunConfig
from ebft_core.errors import UserError

BASE = "base"
KINDS = ("base", "sft", "ebft", "ebft+ce", "sft+ebft")
"""The arms that have a name of their own."""
TRAINED_KEYS = ("ebft", "trainer", "lora", "rollout", "rewards", "sft", "vllm", "health")
"""Sections that an arm may change: none of them decides what is measured on which rows."""
BUDGET_KEYS = ("max_steps", "num_train_epochs", "max_seconds")
_LENT = ("learning_rate", "lr_scheduler", "warmup_ratio", "weight_decay", "save_every", "seed")
_MEASURED = "ebft.mode"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 .,_+=-]*")
_NEXT_KEY = re.compile(r",(?=[A-Za-z_][\w.\[\]]*=)")

Stage = Literal["prepare_base", "sft", "merge"]


@dataclass(frozen=True)
class Arm:
    """One training of a comparison.

    Attributes:
        name: as people read it.
        overrides: `key=value` changes of the run file.
        stage: the stage whose output is the arm's model.
    """

    name: str
    overrides: tuple[str, ...] = ()
    stage: Stage = "merge"


@dataclass(frozen=True)
class Budget:
    """How long every arm trains: optimiser steps, seconds of training or passes over the rows; one is set."""

    max_steps: int | None = None
    max_seconds: float | None = None
    num_train_epochs: float | None = None

    @classmethod
    def of(cls, config: RunConfig, max_steps: int | None, max_seconds: float | None) -> Budget:
        """The budget asked for, else that of the run file's trainer.

        Raises:
            UserError: two budgets are given.
        """
        if max_steps is not None and max_seconds is not None:
            raise UserError(
                "two budgets are given",
                where="--max-steps, --max-seconds",
                expected="at most one of them",
            )
        if max_steps is not None or max_seconds is not None:
            return cls(max_steps, max_seconds)
        trainer = config.trainer
        if trainer.max_steps is None and trainer.max_seconds is None:
            return cls(num_train_epochs=trainer.num_train_epochs or 1.0)
        return cls(trainer.max_steps, trainer.max_seconds)

    @property
    def text(self) -> str:
        """`40 optimiser steps`, `60 seconds of training` or `2 passes over the rows`."""
        if self.max_steps is not None:
            return f"{self.max_steps} optimiser step{'' if self.max_steps == 1 else 's'}"
        if self.max_seconds is not None:
            return f"{self.max_seconds:g} seconds of training"
        return f"{self.num_train_epochs:g} pass{'' if self.num_train_epochs == 1 else 'es'} over the rows"

    def halves(self) -> tuple[Budget, Budget]:
        """Two parts that add up to the whole: of a warm start, and of what follows.

        Raises:
            UserError: a single step cannot be divided.
        """
        if self.max_steps is not None:
            first = self.max_steps // 2
            if first == 0:
                raise UserError(
                    "one optimiser step cannot be divided between a warm start and EBFT",
                    where="--max-steps",
                    value=self.max_steps,
                    expected="at least 2",
                )
            return Budget(max_steps=first), Budget(max_steps=self.max_steps - first)
        if self.max_seconds is not None:
            half = Budget(max_seconds=self.max_seconds / 2)
        else:
            half = Budget(num_train_epochs=(self.num_train_epochs or 1.0) / 2)
        return half, half

    def overrides(self, section: str) -> tuple[str, ...]:
        """The changes that give this budget to a section of the run file."""
        values = {key: getattr(self, key) for key in BUDGET_KEYS}
        return tuple(f"{section}.{key}={'null' if v is None else v}" for key, v in values.items())


def compare_arms(
    config: RunConfig, names: Sequence[str], custom: Mapping[str, Sequence[str]], budget: Budget
) -> list[Arm]:
    """The arms of a comparison, the base first.

    Args:
        names: which of `KINDS`.
        custom: arms of the user's own, as `parse_arm` reads them.
        budget: of every arm; a warm start gets half of it.

    Raises:
        UserError: an unknown or repeated name, or a change that would make the arms not comparable.
    """
    for name in names:
        if name not in KINDS:
            raise UserError(
                "no such arm",
                where="--arms",
                value=name,
                expected=", ".join(KINDS),
                hint="an arm of your own: --arm NAME:key=value,key=value",
            )
    wanted = [BASE, *(name for name in names if name != BASE)]
    _refuse_repeated([*wanted, *custom])
    arms = [_known_arm(name, config, budget) for name in wanted]
    for name, overrides in custom.items():
        check_overrides(overrides, where=f"--arm {name}")
        _refuse_budget(overrides, where=f"--arm {name}")
        arms.append(Arm(name, (*_trained(config, budget, _warm(overrides)), *overrides)))
    return arms


def parse_arm(text: str) -> tuple[str, tuple[str, ...]]:
    """Read `NAME:key=value,key=value` of `--arm` as the name and its overrides.

    Raises:
        UserError: it does not have that form.
    """
    name, colon, changes = text.partition(":")
    overrides = tuple(part for part in _NEXT_KEY.split(changes) if part)
    if not colon or not _NAME.fullmatch(name) or not overrides or not all("=" in part for part in overrides):
        raise UserError(
            "an arm is not of the form NAME:key=value,key=value",
            where="--arm",
            value=text,
            expected="for example `--arm n8:ebft.n_samples_per_prompt=8,ebft.ce_coef=0.03`",
        )
    return name, overrides


def check_overrides(overrides: Iterable[str], *, where: str) -> None:
    """Refuse changes of what is measured: all arms share model, data and evaluation.

    Raises:
        UserError: a key outside of `TRAINED_KEYS`, or the mode.
    """
    for override in overrides:
        key = override.partition("=")[0].strip()
        if re.split(r"[.\[]", key)[0] not in TRAINED_KEYS or key in ("ebft", _MEASURED):
            raise UserError(
                "arms that differ in this key cannot be measured on the same rows",
                where=where,
                value=key,
                expected=f"keys of the sections {', '.join(TRAINED_KEYS)}, without {_MEASURED}",
                hint="change it for all arms with --set, or start another comparison",
            )


def _known_arm(name: str, config: RunConfig, budget: Budget) -> Arm:
    if name == BASE:
        return Arm(BASE, stage="prepare_base")
    if name == "sft":
        return Arm("sft", _warm_start(config, budget), "sft")
    trained = _trained(config, budget, warm=name == "sft+ebft")
    if name == "ebft":
        return Arm(name, (*trained, "ebft.ce_coef=0"))
    if name == "ebft+ce":
        return Arm(name, (*trained, f"ebft.ce_coef={config.ebft.ce_coef or config.compare.ce_coef}"))
    return Arm(name, trained)


def _trained(config: RunConfig, budget: Budget, warm: bool) -> tuple[str, ...]:
    """The budget of an arm that ends with EBFT."""
    if not warm:
        return ("sft=null", *budget.overrides("trainer"))
    first, rest = budget.halves()
    return (*_warm_start(config, first), *rest.overrides("trainer"))


def _warm_start(config: RunConfig, budget: Budget) -> tuple[str, ...]:
    """SFT with the trainer's batches, so that a step of either reads as many rows.

    Its learning rate is that of the section `sft`; a run file without one lends it the trainer's.
    """
    trainer = config.trainer
    values: dict[str, object] = {
        "batch_size": trainer.micro_batch_size * trainer.accumulation,
        "micro_batch_size": trainer.micro_batch_size,
    }
    if config.sft is None:
        values |= {key: getattr(trainer, key) for key in _LENT}
    return (*(f"sft.{key}={value}" for key, value in values.items()), *budget.overrides("sft"))


def _warm(overrides: Sequence[str]) -> bool:
    return any(override.startswith("sft.") for override in overrides)


def _refuse_budget(overrides: Sequence[str], *, where: str) -> None:
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in {f"{section}.{name}" for section in ("trainer", "sft") for name in BUDGET_KEYS}:
            raise UserError(
                "the arms of a comparison share one budget",
                where=where,
                value=key,
                expected="--max-steps or --max-seconds, for all arms",
                hint="`ebft sweep` compares trainings of different lengths",
            )


def _refuse_repeated(names: Sequence[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UserError("two arms have the same name", where="--arms, --arm", value=repeated)
