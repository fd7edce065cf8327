"""`ebft promote`, `ebft rollback` and `ebft registry list`: the registry by hand.

The functions are the commands; `flows/registry_view.py` has what needs MLflow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ebft_core.cli import app, exit_codes
from ebft_core.config import PromotionConfig

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The registered model.")]
WorkspaceOption = Annotated[
    Path, typer.Option("--workspace", help="Folder of the runs; its MLflow is used unless another is named.")
]
UriOption = Annotated[
    str | None, typer.Option("--mlflow-uri", help="MLflow; unset: MLFLOW_TRACKING_URI, then the workspace's.")
]
AliasOption = Annotated[str, typer.Option("--alias", help="Alias of the champion.")]

_WORKSPACE = Path("runs")
_ALIAS = PromotionConfig().champion_alias


@app.command()
def promote(
    name: NameArgument,
    version: Annotated[str, typer.Argument(metavar="VERSION", help="The version's number.")],
    reason: Annotated[str, typer.Option("--reason", help="Why; noted on the version.")] = "by hand",
    alias: AliasOption = _ALIAS,
    workspace: WorkspaceOption = _WORKSPACE,
    mlflow_uri: UriOption = None,
) -> None:
    """Make VERSION the champion, whatever the gate said, after its files were read back and verified."""
    with exit_codes():
        from flows.registry_view import opened, signed

        with opened(name, workspace, mlflow_uri, alias) as registry:
            champion = registry.promote(version, None, by=signed(), reason=reason)
        typer.echo(f"{name}: version {champion.version} is the {alias}")


@app.command()
def rollback(
    name: NameArgument,
    reason: Annotated[
        str, typer.Option("--reason", help="Why; noted on the version that is left.")
    ] = "by hand",
    alias: AliasOption = _ALIAS,
    workspace: WorkspaceOption = _WORKSPACE,
    mlflow_uri: UriOption = None,
) -> None:
    """Make the champion before the present one the champion again, after its files were read back."""
    with exit_codes():
        from flows.registry_view import opened, signed

        with opened(name, workspace, mlflow_uri, alias) as registry:
            champion = registry.rollback(by=signed(), reason=reason)
        typer.echo(f"{name}: version {champion.version} is the {alias} again")


registry = typer.Typer(no_args_is_help=True, help="Registered models and their versions.")
app.add_typer(registry, name="registry")


@registry.command("list")
def list_(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One registered model only.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    alias: AliasOption = _ALIAS,
    workspace: WorkspaceOption = _WORKSPACE,
    mlflow_uri: UriOption = None,
) -> None:
    """Show the versions of registered models: who is champion, and what the gate said."""
    with exit_codes():
        from flows.registry_view import show

        show(name, workspace, mlflow_uri, alias, as_json=json_)
