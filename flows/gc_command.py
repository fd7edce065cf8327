"""`ebft gc`: what no retention rule keeps, in the workspace and in the archive."""

from __future__ import annotations

import json
from typing import Annotated, Protocol

import typer
from rich.console import Console
from rich.table import Table

from ebft_core.cli import ConfigArgument, SetOption, app, exit_codes
from ebft_core.config import RunConfig, load_config
from ebft_core.errors import UserError
from ebft_core.runs import workspace_folder
from ebft_core.storage.retention import Garbage

_SHOWN = 20


class Place(Protocol):
    """The workspace, or the archive."""

    def find(self) -> list[Garbage]:
        """What may be removed."""

    def remove(self, found: Garbage) -> bool:
        """Remove it unless it is wanted by now."""


@app.command()
def gc(
    config: ConfigArgument,
    delete: Annotated[bool, typer.Option("--delete", help="Remove it; else it is only shown.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    overrides: SetOption = None,
) -> None:
    """Show what the section `retention` of CONFIG does not keep, in its workspace and its archive."""
    with exit_codes():
        collect(load_config(config, overrides or ()), delete=delete, as_json=json_)


def collect(config: RunConfig, *, delete: bool, as_json: bool) -> None:
    """Find garbage, remove it if told so, and print it.

    Raises:
        UserError: the registry or the archive does not answer.
    """
    from ebft_core.storage.store import StorageTrouble

    found: list[tuple[str, Garbage, bool]] = []
    try:
        for name, place in places(config).items():
            found += [(name, garbage, delete and place.remove(garbage)) for garbage in place.find()]
    except StorageTrouble as trouble:
        raise UserError(
            "the archive does not answer", where=config.archive_key, hint=trouble.reason
        ) from trouble
    if as_json:
        rows = [{"place": name, **garbage.to_json(), "removed": gone} for name, garbage, gone in found]
        typer.echo(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    _print([(name, garbage) for name, garbage, gone in found if gone or not delete], Console())
    kept = sum(delete and not gone for _, _, gone in found)
    if kept:
        typer.echo(f"{kept} came into use meanwhile and were kept")
    if found and not delete:
        typer.echo("nothing was removed; --delete removes it")


def places(config: RunConfig) -> dict[str, Place]:
    """Where the run file's work lies. Raises UserError if the registry or the archive does not answer."""
    from ebft_core.storage.gc_archive import ArchiveGarbage
    from ebft_core.storage.gc_workspace import WorkspaceGarbage
    from ebft_core.storage.store import open_store
    from tasks.mlflow_uri import tracking_uri
    from tasks.registered_runs import registered_runs

    workspace = workspace_folder(config)
    rules = config.retention
    registered = registered_runs(tracking_uri(config, workspace)) if rules.keep_registered else frozenset()
    found: dict[str, Place] = {"workspace": WorkspaceGarbage(workspace, rules, registered)}
    if config.archive is not None:
        store = open_store(config.archive, config.storage)
        store.check(config.archive_key, write=True)
        found["archive"] = ArchiveGarbage(store, config.storage, rules, registered)
    return found


def _print(found: list[tuple[str, Garbage]], console: Console) -> None:
    if not found:
        console.print("nothing to remove")
        return
    table = Table("place", "what", "name", "size", "why")
    for name, garbage in found[:_SHOWN]:
        table.add_row(name, garbage.kind, garbage.name, f"{garbage.bytes / 1e6:.1f} MB", garbage.why)
    console.print(table)
    if len(found) > _SHOWN:
        console.print(f"and {len(found) - _SHOWN} more (--json shows all)")
    total = sum(garbage.bytes for _, garbage in found)
    console.print(f"{len(found)} in all, {total / 1e6:.1f} MB", highlight=False)
