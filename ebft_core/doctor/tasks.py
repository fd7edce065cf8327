"""The tasks of the evaluation: their problems, the sandbox of generated programs."""

from __future__ import annotations

from ebft_core.config import RunConfig
from ebft_core.doctor.check import Check, guarded
from ebft_core.evaluation.downstream.check import check_tasks, needs_sandbox


def check_downstream(config: RunConfig) -> Check:
    """Whether the tasks of `evaluate.tasks` can be done here."""

    def look() -> Check:
        check_tasks(config)
        names = ", ".join(task.name for task in config.evaluate.tasks)
        sandbox = "; generated programs run in bubblewrap's sandbox" if needs_sandbox(config) else ""
        return Check("tasks", "ok", f"{names}{sandbox}" if names else "none besides the comparison")

    return guarded("tasks", look)
