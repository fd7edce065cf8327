"""The `ebft` command: everything of `ebft_core.cli`, and the commands that need Prefect and MLflow.

Nothing of Prefect is imported here: `ebft validate` must stay quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ebft_core.cli import ConfigArgument, SetOption, app, exit_codes
from ebft_core.config import load_config
from flows import gc_command, group_commands, registry_commands  # noqa: F401 (their commands are installed by the import)
from flows.environment import quiet_libraries
from flows.json_logs import JsonLogsOption
from tasks.services import MLFLOW_PORT, PREFECT_PORT

WorkspaceOption = Annotated[Path, typer.Option("--workspace", help="Folder of the databases, logs and runs.")]


@app.command()
def run(
    config: ConfigArgument,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and estimates; start and write nothing.")
    ] = False,
    json_logs: JsonLogsOption = False,
    overrides: SetOption = None,
) -> None:
    """Run the whole pipeline; the same command again resumes an interrupted run and skips what is done."""
    with exit_codes():
        resolved = load_config(config, overrides or ())  # every mistake is shown before anything starts
        if dry_run:
            from flows.dry_run import dry_run as show

            show(resolved)
            return

        from flows.run_command import run_pipeline

        raise SystemExit(int(run_pipeline(config, overrides or [], resolved, json_logs=json_logs)))


@app.command()
def retrain(
    config: ConfigArgument,
    force: Annotated[bool, typer.Option("--force", help="Run and judge although nothing is new.")] = False,
    json_logs: JsonLogsOption = False,
    overrides: SetOption = None,
) -> None:
    """Retrain if there is new data; the new model becomes the champion only if the gate lets it."""
    with exit_codes():
        resolved = load_config(config, overrides or ())

        from flows.retrain_command import retrain as run_retraining

        code = run_retraining(config, overrides or [], resolved, force=force, json_logs=json_logs)
        raise SystemExit(int(code))


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="The run file (YAML).")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    overrides: SetOption = None,
) -> None:
    """Look at this machine, and at what CONFIG needs of it; exit code 1 if a run would fail."""
    with exit_codes():
        resolved = None if config is None else load_config(config, overrides or ())

        from flows.doctor import doctor as look

        raise SystemExit(look(resolved, as_json=json_))


@app.command()
def up(
    workspace: WorkspaceOption = Path("runs"),
    prefect_port: Annotated[int, typer.Option("--prefect-port", help="Port of Prefect.")] = PREFECT_PORT,
    mlflow_port: Annotated[int, typer.Option("--mlflow-port", help="Port of MLflow.")] = MLFLOW_PORT,
    artifacts: Annotated[
        str | None,
        typer.Option("--artifacts", help="`s3://bucket/prefix` for MLflow's artifacts; unset: a folder."),
    ] = None,
) -> None:
    """Start a Prefect server, an MLflow server, a worker and the deployments; Ctrl-C stops them all."""
    with exit_codes():
        from flows.up import serve

        serve(workspace.expanduser().resolve(), prefect_port, mlflow_port, artifacts)


@app.command()
def deploy(workspace: WorkspaceOption = Path("runs")) -> None:
    """Create the work pool and the deployments on the server of PREFECT_API_URL; `ebft up` does it itself."""
    with exit_codes():
        from flows.deploy import deploy_to_configured

        typer.echo(f"deployed to {deploy_to_configured(workspace.expanduser().resolve())}")


def main() -> None:
    """Entry point of the console command `ebft`."""
    quiet_libraries()  # before any command imports Prefect or MLflow
    app()


if __name__ == "__main__":
    main()
