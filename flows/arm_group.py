"""What `ebft-compare` and `ebft-sweep` have in common: train the arms, measure them together, report."""

from __future__ import annotations

from functools import partial
from typing import Any

from prefect import runtime

from flows.arm import ebft_arm
from flows.run_arms import run_arms
from tasks.accelerator_slot import accelerator_slot
from tasks.compare_arms import measure_arms
from tasks.comparison_report import build_comparison_report
from tasks.prepare_base import prepare_base
from tasks.start_group import GroupRequest, started_group
from tasks.tokenize_data import tokenize_data
from tasks.write_report import write_report


def run_group(request: GroupRequest, *, parallel: int) -> dict[str, Any]:
    """Run a planned group; arms that are trained already, and the comparison if nothing changed, are skipped.

    Returns:
        `{"run_dir", "report", "flow_run", "answer", "failed"}`: two paths, Prefect's id of this run, one
        sentence, and the arms that did not finish with the reason.
    """
    flow_run = str(runtime.flow_run.id)
    with started_group(request, {"prefect.flow_run": flow_run}) as started:
        base = prepare_base(started.folder)
        rows = tokenize_data(started.folder, base)
        calls = {
            name: partial(ebft_arm, *request.parameters[name], run.arm.stage, started.arm_tags(name))
            for name, run in request.group.runs.items()
        }
        outcomes = run_arms(calls, parallel=parallel)
        started.plan_comparison(outcomes.models)
        with accelerator_slot():
            measure_arms(started.folder, [base, rows, *outcomes.models.values()])
        page = partial(build_comparison_report, failed=outcomes.failed)
        report = write_report(started.folder, page)
        return started.finish(report, outcomes.failed, flow_run)
