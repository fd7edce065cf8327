"""What the commands about the registry do and print."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ebft_core.config.redaction import redact_text
from ebft_core.errors import UserError
from ebft_core.lease import user_name
from tasks.mlflow_uri import resolve_uri
from tasks.registered_model import DECIDED_BY, DECISION, REASON, RegisteredModel
from tasks.registry import Registry, registered_models
from tasks.transient import TransientError

_COLOURS = {"promoted": "green", "refused": "red", "rolled back": "yellow"}


@contextlib.contextmanager
def opened(name: str, workspace: Path, mlflow_uri: str | None, alias: str) -> Iterator[Registry]:
    """The registry of model `name`.

    Raises:
        UserError: there is no MLflow, or it does not answer.
    """
    with _answering(workspace, mlflow_uri) as uri:
        yield Registry(uri, name, champion_alias=alias)


def signed() -> str:
    """Who gives this command, as it is noted on versions."""
    return f"{user_name()}@{socket.gethostname()}"


def show(name: str | None, workspace: Path, mlflow_uri: str | None, alias: str, *, as_json: bool) -> None:
    """Print the versions of one registered model, or of all.

    Raises:
        UserError: there is no MLflow, it does not answer, or nothing is registered under the name.
    """
    with _answering(workspace, mlflow_uri) as uri:
        names = registered_models(uri) if name is None else [name]
        versions = {n: Registry(uri, n, champion_alias=alias).versions() for n in names}
    if name is not None and not versions[name]:
        raise UserError("no such registered model", where="NAME", value=name, hint="`ebft registry list`")
    if as_json:
        typer.echo(json.dumps({n: [_plain(v) for v in found] for n, found in versions.items()}, indent=1))
        return
    console = Console()
    if not names:
        console.print("nothing is registered yet")
    for model, found in versions.items():
        console.print(_table(model, found))


@contextlib.contextmanager
def _answering(workspace: Path, mlflow_uri: str | None) -> Iterator[str]:
    uri = resolve_uri(mlflow_uri, workspace.expanduser().resolve(), where="--mlflow-uri")
    database = Path(uri.removeprefix("sqlite:///"))
    if uri.startswith("sqlite:///") and not database.is_file():
        raise UserError(
            "no runs were tracked here",
            where="--workspace",
            value=str(database),
            expected="the workspace of a run, with its mlflow.db",
        )
    try:
        yield uri
    except TransientError as error:
        raise UserError("the registry does not answer", where=redact_text(uri), hint=str(error)) from error


def _table(name: str, versions: Sequence[RegisteredModel]) -> Table:
    table = Table(title=name, title_justify="left")
    table.add_column("version", justify="right")
    table.add_column("aliases")
    table.add_column("registered", no_wrap=True)
    table.add_column("decision", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for version in versions:
        decision = version.tags.get(DECISION, "")
        by = version.tags.get(DECIDED_BY)
        table.add_row(
            version.version,
            ", ".join(version.aliases),
            f"{version.created:%Y-%m-%d %H:%M} UTC",
            Text(decision, style=_COLOURS.get(decision, "")),
            Text(version.tags.get(REASON, "") + (f" (by {by})" if by else "")),
        )
    return table


def _plain(version: RegisteredModel) -> dict[str, Any]:
    return {**vars(version), "created": version.created.isoformat()}
