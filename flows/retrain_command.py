"""The body of `ebft retrain`: the checks, the flow, the summary."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from ebft_core.config import RunConfig
from ebft_core.errors import ExitCode
from ebft_core.retrain import check_retrainable
from ebft_core.runs import workspace_folder
from flows.environment import check_approval
from flows.follow import follow
from flows.json_logs import write_note
from flows.summary import print_summary, summarise_run


def retrain(
    config: Path, overrides: Sequence[str], resolved: RunConfig, *, force: bool, json_logs: bool
) -> ExitCode:
    """Run the flow `ebft-retrain` and say what came of it: a refused model is an answer, not a failure.

    Raises:
        UserError: anything the user can mend.
        SystemExit: the run ended early (see `follow`).
    """
    check_retrainable(resolved)
    check_approval(resolved, workspace_folder(resolved))
    changes = [part for override in overrides for part in ("--set", override)]
    again = shlex.join(["ebft", "retrain", str(config), *(["--force"] if force else []), *changes])

    def run_flow() -> dict[str, Any]:
        from flows.retrain import ebft_retrain

        state = ebft_retrain(str(config), list(overrides), force, return_state=True)
        return cast(dict[str, Any], state.result())  # the flow returns a state, and these are its data

    result = follow(run_flow, workspace=workspace_folder(resolved), again=again, json_logs=json_logs)
    if json_logs:
        write_note("result", **result)
        return ExitCode.DONE
    console = Console()
    if "run_dir" in result:
        print_summary(summarise_run(Path(result["run_dir"]), flow_run=result["flow_run"]), console)
    console.print(result["reason"], highlight=False, soft_wrap=True, markup=False)
    return ExitCode.DONE
