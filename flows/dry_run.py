"""`ebft run --dry-run`: what would run and what it would take. Starts nothing and writes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Set
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ebft_core.config import RunConfig
from ebft_core.config.loading import dump_yaml
from ebft_core.estimates import Estimates, estimate
from ebft_core.runs import RunPlan, StageState, plan_run
from ebft_core.storage.archive import open_archive
from ebft_core.storage.commands import survey
from tasks.mlflow_uri import tracking_uri

_GB = 1e9
_STATES: dict[StageState, tuple[str, str]] = {
    "done": ("done", "green"),
    "partial": ("resumes", "yellow"),
    "missing": ("to do", ""),
}


def dry_run(config: RunConfig) -> None:
    """Print the resolved configuration, the stages with their state, and the estimates.

    Raises:
        UserError: whatever would keep the run from starting.
    """
    plan = plan_run(config)
    uri = tracking_uri(config, plan.workspace)
    estimates = estimate(config, plan)
    typer.echo(dump_yaml(config))
    console = Console()
    archive = open_archive(config, plan)
    archived = {name for name, there in survey(archive).items() if there} if archive is not None else set()
    to_fetch = {name for name in archived if plan.stage(name).state != "done"}
    console.print(_stages(plan, estimates, to_fetch))
    seconds = sum(value for name, value in estimates.seconds.items() if name not in to_fetch)
    facts = {
        "run folder": str(plan.run_dir),
        "tracking": uri,
        "steps": "not known yet" if estimates.steps is None else f"{estimates.steps:,}",
        "memory": _size(estimates.memory_bytes, "estimated peak of training"),
        "disk": f"{_size(estimates.disk_bytes, 'estimated')}, {_free(plan.workspace) / _GB:.1f} GB free, "
        f"{config.storage.reserve_gb:g} GB reserve",
        "time": _time(estimates, seconds),
    }
    for name, value in facts.items():
        console.print(f"{name:<11} {value}", highlight=False, soft_wrap=True, markup=False)
    for assumption in estimates.assumptions:
        console.print(f"  {assumption}", highlight=False, soft_wrap=True, markup=False, style="dim")
    console.print("nothing was started or written", highlight=False)


def _stages(plan: RunPlan, estimates: Estimates, to_fetch: Set[str]) -> Table:
    table = Table(title="stages", title_justify="left")
    table.add_column("stage")
    table.add_column("state")
    table.add_column("estimated time", justify="right")
    table.add_column("key")
    for stage in plan.stages:
        label, style = ("in the archive", "green") if stage.name in to_fetch else _STATES[stage.state]
        seconds = None if stage.name in to_fetch else estimates.seconds.get(stage.name)
        duration = "" if seconds is None else _duration(seconds)
        table.add_row(stage.name, Text(label, style=style), duration, stage.key[:12])
    return table


def _size(count: int | None, kind: str) -> str:
    if count is None:
        return "not known yet"
    shown = f"{count / 1e6:.0f} MB" if count < 0.1 * _GB else f"{count / _GB:.1f} GB"
    return f"{shown} ({kind})"


def _time(estimates: Estimates, seconds: float) -> str:
    if estimates.memory_bytes is None:
        return "not known yet"
    if not seconds:
        return "nothing left that takes long"
    return f"{_duration(seconds)} (estimated)"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{max(seconds, 1):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _free(workspace: Path) -> int:
    """Free bytes where the workspace is or will be."""
    here = next(folder for folder in (workspace, *workspace.parents) if folder.exists())
    return shutil.disk_usage(here).free
