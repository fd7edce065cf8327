"""The flow `ebft-sweep`: one training for every combination of a grid, and which of them is best."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.arm_group import run_group
from tasks.accelerator_slot import count_slots
from tasks.flow_names import group_run_name
from tasks.start_group import check_parallel, request_sweep


@flow(name="ebft-sweep", flow_run_name=group_run_name, persist_result=False, result_serializer="json")
def ebft_sweep(
    config: str | dict[str, Any],
    overrides: list[str] | None = None,
    grid: dict[str, list[Any]] | None = None,
    parallel: int | None = None,
) -> dict[str, Any]:
    """Train every combination, a few at a time, and measure all of them together.

    Args:
        config, overrides: as flow `ebft` takes them.
        grid: key → values, for example `{"ebft.ce_coef": [0, 0.03, 0.1]}`; unset: that of `sweep.grid`.
        parallel: trainings at a time; unset: `sweep.parallel`, or the size of Prefect's limit.

    Returns:
        As `run_group`.
    """
    request = request_sweep(config, overrides or [], grid=grid)
    wanted = parallel or request.group.config.sweep.parallel or count_slots()
    return run_group(request, parallel=check_parallel(request.group.config, wanted))
