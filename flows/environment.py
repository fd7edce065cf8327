"""Settings of Prefect and MLflow for a run on one machine. To be called before either is imported."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from ebft_core.config import RunConfig
from ebft_core.errors import UserError
from tasks.services import QUIET, answers, free_port, noted_services, prefect_server, running

_NOISY_LOGGERS = ("alembic", "mlflow", "httpx", "urllib3", "prefect", "git")


def quiet_libraries() -> None:
    """No telemetry; on the terminal only what concerns the user. Settings of the user win."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")  # the server gets all of it
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def check_approval(config: RunConfig, workspace: Path) -> None:
    """Refuse a run that would wait for an answer which nobody could give.

    Raises:
        UserError: `promotion.require_approval`, and `prefect_api` would start a server without pages.
    """
    from prefect.settings import PREFECT_API_URL

    if not config.promotion.require_approval or PREFECT_API_URL.value() or noted_services(workspace):
        return
    raise UserError(
        "nobody could approve the model: no Prefect server with pages runs",
        where="promotion.require_approval",
        value=True,
        hint=f"start `ebft up --workspace {workspace}` first, or set PREFECT_API_URL",
    )


@contextlib.contextmanager
def prefect_api(workspace: Path) -> Iterator[str]:
    """A Prefect server for one run: the configured one, that of `ebft up`, or one of our own.

    Prefect's own temporary server is not used: it shares our process group, so Ctrl-C would end it
    before the run could say goodbye, and it would outlive a killed run.

    Raises:
        UserError: the configured server does not answer, or ours does not start.
    """
    from prefect.logging.handlers import APILogHandler
    from prefect.settings import PREFECT_API_URL, temporary_settings

    configured = PREFECT_API_URL.value()
    if configured:
        check_server(configured)
        yield configured
        return
    noted = noted_services(workspace)
    if noted is not None:
        with temporary_settings({PREFECT_API_URL: noted["prefect_api"]}):
            yield noted["prefect_api"]
        return
    port = free_port()
    server = prefect_server(workspace, port, ui=False)
    with running([server]), temporary_settings({PREFECT_API_URL: server.env["PREFECT_API_URL"]}):
        try:
            yield server.env["PREFECT_API_URL"]
        finally:
            APILogHandler().flush()  # while there is a server to take the logs


def check_server(api: str) -> None:
    """Raise UserError unless the configured Prefect server answers."""
    if not answers(f"{api.rstrip('/')}/health"):
        raise UserError(
            "the Prefect server does not answer",
            where="PREFECT_API_URL",
            value=api,
            hint="start it (`prefect server start`), or unset PREFECT_API_URL to run without one",
        )
