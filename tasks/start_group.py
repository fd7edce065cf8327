"""From a flow's parameters to a started comparison or sweep: arms, plans, checks, folder, tracking."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebft_core.arm_group import ArmGroup, comparison_plan, name_of_run, plan_group, write_group
from ebft_core.arms import BASE, Arm, Budget, compare_arms
from ebft_core.comparison import Kind
from ebft_core.config import RunConfig
from ebft_core.config.loading import with_overrides
from ebft_core.errors import UserError
from ebft_core.lease import hold_lease
from ebft_core.preflight import check_preflight
from ebft_core.runs import read_plan
from ebft_core.sweep import sweep_arms
from tasks.archived_run import archived_run
from tasks.comparison_report import comparison_file, read_comparison
from tasks.flow_names import ARM
from tasks.mlflow_uri import tracking_uri
from tasks.start_run import read_config
from tasks.tracking import tracked_run, wait_for_run_id

if TYPE_CHECKING:
    from tasks.journal_sync import JournalSync

logger = logging.getLogger(__name__)

PARENT = "mlflow.parentRunId"
_WAIT_SECONDS = 60.0

Parameters = tuple[str | dict[str, Any], list[str]]
"""A configuration and its overrides, as the flows take them."""


@dataclass(frozen=True)
class GroupRequest:
    """A checked request: the planned group, and the parameters of each arm's flow run by the arm's name."""

    group: ArmGroup
    parameters: Mapping[str, Parameters]
    mlflow_uri: str


@dataclass(frozen=True)
class StartedGroup:
    """A group that holds its folder and is being tracked; `parent_run`: its id in MLflow, if known."""

    request: GroupRequest
    tracker: JournalSync
    parent_run: str | None

    @property
    def folder(self) -> str:
        """The group's folder, as tasks take it."""
        return str(self.request.group.plan.run_dir)

    def plan_comparison(self, finished: Collection[str]) -> None:
        """Note in the group's plan which arms will be measured."""
        write_group(self.request.group, comparison_plan(self.request.group, finished))

    def arm_tags(self, arm: str) -> dict[str, str]:
        """Tags of an arm's run in MLflow: its name, and its place below the group's run."""
        return {ARM: arm} if self.parent_run is None else {ARM: arm, PARENT: self.parent_run}

    def finish(self, report: str, failed: Mapping[str, str], flow_run: str) -> dict[str, Any]:
        """Hand the results to the trackers and return where they are."""
        from tasks.track_arms import parent_values, track_arms  # mlflow takes seconds to import

        plan = read_plan(self.request.group.plan.run_dir)
        source = comparison_file(plan)
        comparison = read_comparison(plan)
        self.tracker.attach(Path(report))
        self.tracker.attach(source)
        self.tracker.add_values(parent_values(comparison), source)
        track_arms(self.request.group, comparison, source, self.request.mlflow_uri)
        return {
            "run_dir": self.folder,
            "report": report,
            "flow_run": flow_run,
            "answer": comparison.answer,
            "failed": dict(failed),
        }


def request_comparison(
    config: str | Mapping[str, Any],
    overrides: Sequence[str],
    *,
    arms: Sequence[str] | None,
    own_arms: Mapping[str, Sequence[str]] | None,
    max_steps: int | None,
    max_seconds: float | None,
) -> GroupRequest:
    """Plan and check `ebft compare`; starts and writes nothing.

    Args:
        arms: names of the known arms; None: those of `compare.arms`.
        own_arms: name → overrides of further arms.
        max_steps, max_seconds: the budget; None: that of the run file's trainer.

    Raises:
        UserError: anything the user can mend.
    """
    resolved = read_config(config, overrides)
    budget = Budget.of(resolved, max_steps, max_seconds)
    wanted = resolved.compare.arms if arms is None else arms
    planned = compare_arms(resolved, wanted, own_arms or {}, budget)
    metric = resolved.compare.metric
    return _request("compare", config, overrides, resolved, planned, metric, budget.text)


def request_sweep(
    config: str | Mapping[str, Any], overrides: Sequence[str], *, grid: Mapping[str, Sequence[Any]] | None
) -> GroupRequest:
    """Plan and check `ebft sweep`; starts and writes nothing.

    Args:
        grid: key → values; None: that of `sweep.grid`.

    Raises:
        UserError: anything the user can mend.
    """
    resolved = read_config(config, overrides)
    wanted, where = (resolved.sweep.grid, "sweep.grid") if grid is None else (grid, "--grid")
    planned = sweep_arms(wanted, where=where)
    varied = any(key.startswith(("trainer.max_", "trainer.num_train_epochs")) for key in wanted)
    budget = "the steps of the grid" if varied else Budget.of(resolved, None, None).text
    return _request("sweep", config, overrides, resolved, planned, resolved.sweep.metric, budget)


def check_parallel(config: RunConfig, parallel: int) -> int:
    """The number of trainings at a time, if the run file allows it.

    Raises:
        UserError: fewer than one, or several where each would start a vLLM server.
    """
    if parallel < 1:
        raise UserError("no training at a time", where="--parallel", value=parallel, expected="1 or more")
    if parallel > 1 and config.ebft.mode == "structured" and config.rollout.use_vllm:
        raise UserError(
            "each of these trainings has a vLLM server with GPUs of its own, so they run one after the other",
            where="--parallel, sweep.parallel",
            value=parallel,
            expected="1 with `rollout.use_vllm`",
        )
    return parallel


@contextlib.contextmanager
def started_group(request: GroupRequest, tags: Mapping[str, str]) -> Iterator[StartedGroup]:
    """Hold the group's folder and track it as the parent of its arms while the block runs.

    Raises:
        UserError: the group is already going on.
    """
    group, uri = request.group, request.mlflow_uri
    with hold_lease(group.plan.run_dir), archived_run(group.plan, group.config):
        write_group(group, group.plan)
        with tracked_run(group.plan, group.config, uri, {**tags, "ebft.group": group.kind}) as tracker:
            parent = wait_for_run_id(group.plan.run_dir, _WAIT_SECONDS)
            if parent is None:
                logger.warning("MLflow does not answer: the runs of the arms will not stand below a parent")
            yield StartedGroup(request, tracker, parent)


def _request(
    kind: Kind,
    config: str | Mapping[str, Any],
    overrides: Sequence[str],
    resolved: RunConfig,
    arms: Sequence[Arm],
    metric: str,
    budget: str,
) -> GroupRequest:
    trained = [arm for arm in arms if arm.name != BASE]
    parameters = {arm.name: _arm_parameters(config, overrides, resolved, arm) for arm in trained}
    configs = {name: read_config(*parameters[name]) for name in parameters}
    group = plan_group(
        kind, resolved, [(arm, configs[arm.name]) for arm in trained], metric=metric, budget=budget
    )
    uri = tracking_uri(resolved, group.plan.workspace)
    for name, run in group.runs.items():
        check_preflight(configs[name], run.plan)
    return GroupRequest(group, parameters, uri)


def _arm_parameters(
    config: str | Mapping[str, Any], overrides: Sequence[str], resolved: RunConfig, arm: Arm
) -> Parameters:
    changes = [f"name={name_of_run(resolved, arm)}", *arm.overrides]
    if isinstance(config, str):
        return config, [*overrides, *changes]
    return with_overrides(config, changes), []
