"""The grid of a sweep: every combination of the values of some keys is an arm."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ebft_core.arms import BASE, Arm, check_overrides
from ebft_core.config.yaml_reader import read_value
from ebft_core.errors import UserError

MAX_ARMS = 256
"""Combinations of one sweep: more is a mistake in the grid."""


def parse_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Read `key=v1,v2` of `--grid`; the values are YAML, so `[a, b]` is one of them.

    Raises:
        UserError: not of that form, or a key given twice.
    """
    grid: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        key = key.strip()
        if not equals or not key or not values.strip():
            raise UserError(
                "a grid is not of the form key=value,value",
                where="--grid",
                value=text,
                expected="for example `--grid ebft.ce_coef=0,0.03,0.1`",
            )
        if key in grid:
            raise UserError("a key of the grid is given twice", where="--grid", value=key)
        grid[key] = read_value(f"[{values}]", f"--grid {key}")
    return grid


def sweep_arms(grid: Mapping[str, Sequence[Any]], *, where: str) -> list[Arm]:
    """The base and one arm per combination, the last key varying fastest.

    Args:
        where: what a mistake is reported of: `--grid` or `sweep.grid`.

    Raises:
        UserError: an empty grid, a repeated value, too many combinations, or a key that decides what is
            measured.
    """
    if not grid or not all(grid.values()):
        raise UserError(
            "nothing to vary",
            where=where,
            value=dict(grid),
            expected="a key of the run file and its values, for example `--grid ebft.ce_coef=0,0.03,0.1`",
        )
    for key, values in grid.items():
        check_overrides([f"{key}="], where=f"{where} {key}")
        written = [json.dumps(value) for value in values]
        if len(set(written)) < len(written):
            raise UserError("a value stands twice in the grid", where=f"{where} {key}", value=list(values))
    cells = list(itertools.islice(itertools.product(*grid.values()), MAX_ARMS + 1))
    if len(cells) > MAX_ARMS:
        raise UserError("the grid has too many combinations", where=where, expected=f"at most {MAX_ARMS}")
    labels = _labels(list(grid))
    return [Arm(BASE, stage="prepare_base"), *(_arm(list(grid), labels, cell) for cell in cells)]


def _arm(keys: Sequence[str], labels: Sequence[str], values: Sequence[Any]) -> Arm:
    name = " ".join(f"{label}={_shown(value)}" for label, value in zip(labels, values, strict=True))
    overrides = (f"{key}={json.dumps(value)}" for key, value in zip(keys, values, strict=True))
    return Arm(name, tuple(overrides))


def _labels(keys: Sequence[str]) -> list[str]:
    """The last part of each key, or the whole key where two end alike."""
    last = [key.rsplit(".", 1)[-1] for key in keys]
    return [short if last.count(short) == 1 else key for key, short in zip(keys, last, strict=True)]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
