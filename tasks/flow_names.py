"""How flow runs are called in Prefect."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from prefect import runtime

ARM = "ebft.arm"
"""Tag of an arm's run, in MLflow: the arm's name."""


def flow_run_name() -> str:
    """The name of the run file (or of the run, for a configuration given as an object) and the time."""
    config = runtime.flow_run.parameters["config"]
    name = config.get("name", "ebft") if isinstance(config, dict) else Path(config).stem
    return f"{name} {datetime.now():%Y-%m-%d %H:%M}"


def group_run_name() -> str:
    """The same, with what is done: `compare quickstart 2026-01-31 12:00`."""
    kind = runtime.flow_run.flow_name.removeprefix("ebft-")
    return f"{kind} {flow_run_name()}"


def arm_run_name() -> str:
    """The arm's name, under the name of its run file."""
    return f"{runtime.flow_run.parameters['tags'][ARM]}: {flow_run_name()}"
