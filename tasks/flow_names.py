"""How flow runs are called in Prefect."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from prefect import runtime


def flow_run_name() -> str:
    """The name of the run file (or of the run, for a configuration given as an object) and the time."""
    config = runtime.flow_run.parameters["config"]
    name = config.get("name", "ebft") if isinstance(config, dict) else Path(config).stem
    return f"{name} {datetime.now():%Y-%m-%d %H:%M}"
