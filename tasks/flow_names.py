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
    overrides = runtime.flow_run.parameters.get("overrides") or ()
    return _named(shorten(redact_text(", ".join(overrides)), _CHANGES_LENGTH, placeholder=" …"))


def group_run_name() -> str:
    """The same, with what is done: `compare quickstart 2026-01-31 12:00`."""
    kind = runtime.flow_run.flow_name.removeprefix("ebft-")
    return f"{kind} {flow_run_name()}"


def arm_run_name() -> str:
    """The arm's name in the place of its changes, which it stands for."""
    return _named(runtime.flow_run.parameters["tags"][ARM])


def _named(changes: str) -> str:
    config = runtime.flow_run.parameters["config"]
    name = config.get("name", "ebft") if isinstance(config, dict) else Path(config).stem
    return " ".join(part for part in (name, changes, f"{datetime.now():%Y-%m-%d %H:%M}") if part)
