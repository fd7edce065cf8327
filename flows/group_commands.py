"""`ebft compare` and `ebft sweep`.

The functions are the commands; `flows/group_command.py` runs the flows and shows the result.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ebft_core.arms import parse_arm
from ebft_core.cli import ConfigArgument, SetOption, app, exit_codes
from ebft_core.errors import UserError
from ebft_core.sweep import parse_grid
from flows.json_logs import JsonLogsOption


@app.command()
def compare(
    config: ConfigArgument,
    arms: Annotated[
        str | None,
        typer.Option("--arms", help="Some of base, sft, ebft, ebft+ce, sft+ebft; unset: those of the file."),
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option("--arm", metavar="NAME:KEY=VALUE,…", help="An arm of your own. Repeatable."),
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option("--max-steps", min=1, help="Optimiser steps of every arm.")
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option("--max-seconds", min=1.0, help="Seconds of training of every arm.")
    ] = None,
    json_logs: JsonLogsOption = False,
    overrides: SetOption = None,
) -> None:
    """Train EBFT, SFT and other arms on the same data with the same budget, and say which is best."""
    with exit_codes():
        from flows.group_command import run_comparison

        own_arms: dict[str, list[str]] = {}
        for text in arm or []:
            name, changes = parse_arm(text)
            if name in own_arms:
                raise UserError("two arms have the same name", where="--arm", value=name)
            own_arms[name] = list(changes)
        parameters = {
            "arms": None if arms is None else [name.strip() for name in arms.split(",")],
            "own_arms": own_arms,
            "max_steps": max_steps,
            "max_seconds": max_seconds,
        }
        raise SystemExit(int(run_comparison(config, overrides or [], parameters, json_logs=json_logs)))


@app.command()
def sweep(
    config: ConfigArgument,
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="KEY=V1,V2,…", help="A key and its values; unset: the file's grid."),
    ] = None,
    parallel: Annotated[
        int | None, typer.Option("--parallel", min=1, help="Trainings at a time; unset: one per slot.")
    ] = None,
    json_logs: JsonLogsOption = False,
    overrides: SetOption = None,
) -> None:
    """Train every combination of a grid, measure all of them together, and mark the best."""
    with exit_codes():
        from flows.group_command import run_sweep

        wanted = parse_grid(grid) if grid else None
        raise SystemExit(
            int(run_sweep(config, overrides or [], wanted, parallel=parallel, json_logs=json_logs))
        )
