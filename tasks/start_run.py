"""From a flow's parameters to a started run: configuration, plan, checks, lease, run folder, tracking."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebft_core.config import RunConfig, load_config, parse_config
from ebft_core.errors import UserError
from ebft_core.lease import hold_lease
from ebft_core.preflight import check_preflight
from ebft_core.runs import RunPlan, plan_run
from tasks.archived_run import archived_run
from tasks.mlflow_uri import tracking_uri
from tasks.report_markdown import markdown_report
from tasks.tracking import tracked_run

if TYPE_CHECKING:
    from tasks.journal_sync import JournalSync


@dataclass(frozen=True)
class StartedRun:
    """A run that holds its folder and is being tracked."""

    config: RunConfig
    plan: RunPlan
    mlflow_uri: str
    tracker: JournalSync

    @property
    def folder(self) -> str:
        """The run's folder, as tasks take it."""
        return str(self.plan.run_dir)

    def finish(self, report: str, flow_run: str) -> dict[str, str]:
        """Hand the results to the tracker and return where they are."""
        evaluation = self.plan.stage("evaluate").output / "evaluation.json"
        self.tracker.attach(Path(report))
        self.tracker.attach(evaluation)
        self.tracker.attach(evaluation.with_name("rollouts.json"))
        self.tracker.attach(evaluation.with_name("answers.json"))
        self.tracker.add_evaluation(evaluation)
        self.tracker.describe(markdown_report(self.plan.run_dir))
        return {"run_dir": self.folder, "report": report, "flow_run": flow_run}


@contextlib.contextmanager
def started_run(
    config: str | Mapping[str, Any], overrides: Sequence[str], tags: Mapping[str, str]
) -> Iterator[StartedRun]:
    """Check everything that can be checked before anything runs, then hold and track the run.

    Args:
        config: path of a run file, or its content.
        overrides: `a.b=value` changes of a run file.
        tags: for the run in MLflow.

    Raises:
        UserError: anything the user can mend; nothing was started or half-written.
    """
    resolved = read_config(config, overrides)
    plan, uri = check_start(resolved)
    with (
        hold_lease(plan.run_dir),
        archived_run(plan, resolved),
        tracked_run(plan, resolved, uri, tags) as tracker,
    ):
        yield StartedRun(resolved, plan, uri, tracker)


def check_start(config: RunConfig) -> tuple[RunPlan, str]:
    """The plan and the tracking uri of a run that may start. Raises UserError; starts and writes nothing."""
    plan = plan_run(config)
    uri = tracking_uri(config, plan.workspace)
    check_preflight(config, plan)
    return plan, uri


def read_config(config: str | Mapping[str, Any], overrides: Sequence[str]) -> RunConfig:
    """The configuration that a flow was given. Raises UserError."""
    if isinstance(config, str):
        return load_config(Path(config), overrides)
    if overrides:
        raise UserError(
            "overrides go with the path of a run file",
            where="overrides",
            value=list(overrides),
            hint="change the configuration object itself",
        )
    return parse_config(config)
