"""How flow runs are called in Prefect."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from textwrap import shorten

from prefect import runtime

from ebft_core.config.redaction import redact_text

ARM = "ebft.arm"
"""Tag of an arm's run, in MLflow: the arm's name."""

_CHANGES_LENGTH = 60


def flow_run_name() -> str:
    """The run file's name (the run's, for a configuration given as an object), its changes, the time."""
    parameters = runtime.flow_run.parameters
    config, overrides = parameters["config"], parameters.get("overrides") or ()
    name = config.get("name", "ebft") if isinstance(config, dict) else Path(config).stem
    changes = shorten(redact_text(", ".join(overrides)), _CHANGES_LENGTH, placeholder=" …")
    return " ".join(part for part in (name, changes, f"{datetime.now():%Y-%m-%d %H:%M}") if part)


def group_run_name() -> str:
    """The same, with what is done: `compare quickstart 2026-01-31 12:00`."""
    kind = runtime.flow_run.flow_name.removeprefix("ebft-")
    return f"{kind} {flow_run_name()}"


def arm_run_name() -> str:
    """The arm's name, under the name of its run file."""
    return f"{runtime.flow_run.parameters['tags'][ARM]}: {flow_run_name()}"
