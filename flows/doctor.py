"""The body of `ebft doctor`: every check, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ebft_core.config import RunConfig, TrainerConfig
from ebft_core.doctor import Check
from ebft_core.doctor.machine import check_data_and_disk, check_device, check_folder, check_versions
from ebft_core.doctor.model import check_model
from ebft_core.doctor.server import check_vllm
from ebft_core.doctor.tasks import check_downstream
from tasks.doctor import check_mlflow, check_prefect

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_DEFAULT_WORKSPACE = "runs"


def doctor(config: RunConfig | None, *, as_json: bool) -> int:
    """Run all checks and show them; 1 if one failed, else 0."""
    with Console(stderr=True).status("looking"):
        checks = list(all_checks(config))
    if as_json:
        typer.echo(json.dumps([check.to_json() for check in checks], indent=1, ensure_ascii=False))
    else:
        _print(checks, Console())
    return int(any(check.verdict == "fail" for check in checks))


def all_checks(config: RunConfig | None) -> Iterator[Check]:
    """The checks of the machine, and those of the run file if there is one."""
    name = _DEFAULT_WORKSPACE if config is None else config.local_workspace
    workspace = (Path.cwd() / Path(name).expanduser()).resolve()
    yield from check_versions()
    yield from check_device(TrainerConfig() if config is None else config.trainer)
    yield check_folder(workspace)
    if config is not None:
        yield check_data_and_disk(config)
        yield from check_model(config)
        yield from check_vllm(config)
        yield check_downstream(config)
        yield check_mlflow(config, workspace)
    yield check_prefect(workspace)


def _print(checks: list[Check], console: Console) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        table.add_row(Text(check.verdict, style=_COLOURS[check.verdict]), check.name, Text(check.detail))
        if check.hint is not None:
            table.add_row("", "", Text(f"→ {check.hint}", style="dim"))
    console.print(table)
    count = {verdict: sum(check.verdict == verdict for check in checks) for verdict in _COLOURS}
    console.print(f"\n{count['ok']} ok, {count['warn']} to look at, {count['fail']} failed", highlight=False)
