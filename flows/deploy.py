"""`ebft deploy`: work pool, deployments of `prefect.yaml` and accelerator slot, at a Prefect server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ebft_core.errors import UserError
from flows.environment import check_server
from tasks.services import QUIET, tail

POOL = "ebft-process"
DEPLOYMENTS = "prefect.yaml"
_COMMAND_SECONDS = 120.0


def deploy_to_configured(workspace: Path) -> str:
    """Deploy to the server of `PREFECT_API_URL`; returns its address.

    Raises:
        UserError: there is no such setting, the server does not answer, or as `deploy`.
    """
    from prefect.settings import PREFECT_API_URL

    api = PREFECT_API_URL.value()
    if not api:
        raise UserError(
            "no Prefect server to deploy to",
            where="PREFECT_API_URL",
            expected="the address of a server, for example http://127.0.0.1:4200/api",
            hint="`ebft up` starts one and deploys to it",
        )
    check_server(api)
    deploy(api, workspace / "services" / "deploy.log")
    return api


def check_deployments() -> None:
    """Raise UserError where there is no `prefect.yaml`."""
    if not Path(DEPLOYMENTS).is_file():
        raise UserError(
            "no deployments here",
            where=str(Path.cwd()),
            expected=f"a file {DEPLOYMENTS}",
            hint="call `ebft up` and `ebft deploy` in the folder of the repository",
        )


def deploy(api: str, log: Path) -> None:
    """Create the work pool, everything in `prefect.yaml` and the accelerator slot.

    Raises:
        UserError: no `prefect.yaml` here, or one of Prefect's commands failed; with the log's end.
    """
    from tasks.accelerator_slot import create_slot

    check_deployments()
    _prefect(["work-pool", "create", POOL, "--type", "process", "--overwrite"], api, log)
    _prefect(["--no-prompt", "deploy", "--all"], api, log)
    create_slot(api)


def _prefect(arguments: list[str], api: str, log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as stream:
        done = subprocess.run(
            [sys.executable, "-m", "prefect", *arguments],
            env={**os.environ, **QUIET, "PREFECT_API_URL": api},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            timeout=_COMMAND_SECONDS,
            check=False,
        )
    if done.returncode != 0:
        raise UserError(f"`prefect {' '.join(arguments)}` failed", where=str(log), hint=tail(log))
