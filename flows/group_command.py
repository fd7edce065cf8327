"""The bodies of `ebft compare` and `ebft sweep`: the checks, the flow, the table and the answer."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ebft_core.errors import ExitCode
from ebft_core.runs import read_plan
from flows.follow import follow
from flows.group_summary import print_group
from flows.json_logs import write_note
from tasks.comparison_report import read_comparison
from tasks.start_group import GroupRequest, check_parallel, request_comparison, request_sweep


def run_comparison(
    config: Path, overrides: Sequence[str], parameters: Mapping[str, Any], *, json_logs: bool
) -> ExitCode:
    """Run the flow `ebft-compare` with `parameters` and print its result.

    Raises:
        UserError: anything the user can mend.
        SystemExit: the run ended early (see `follow`).
    """
    request = request_comparison(str(config), overrides, **parameters)

    def run_flow() -> dict[str, Any]:
        from flows.compare import ebft_compare

        return ebft_compare(str(config), list(overrides), **parameters)

    return _run(request, run_flow, json_logs)


def run_sweep(
    config: Path,
    overrides: Sequence[str],
    grid: Mapping[str, Sequence[Any]] | None,
    *,
    parallel: int | None,
    json_logs: bool,
) -> ExitCode:
    """The same for the flow `ebft-sweep`; `grid` and `parallel` as it takes them."""
    request = request_sweep(str(config), overrides, grid=grid)
    check_parallel(request.group.config, parallel or request.group.config.sweep.parallel or 1)

    def run_flow() -> dict[str, Any]:
        from flows.sweep import ebft_sweep

        values = None if grid is None else {key: list(choices) for key, choices in grid.items()}
        return ebft_sweep(str(config), list(overrides), values, parallel)

    return _run(request, run_flow, json_logs)


def _run(request: GroupRequest, run_flow: Callable[[], dict[str, Any]], json_logs: bool) -> ExitCode:
    again = shlex.join(["ebft", *sys.argv[1:]])
    result = follow(run_flow, workspace=request.group.plan.workspace, again=again, json_logs=json_logs)
    run_dir = Path(result["run_dir"])
    if json_logs:
        write_note("result", **result, comparison=read_comparison(read_plan(run_dir)).to_json())
    else:
        print_group(run_dir, result, Console())
    return ExitCode.DONE
