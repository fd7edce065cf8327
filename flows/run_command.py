"""The body of `ebft run`: servers, the flow, the summary, and one message when it ends early."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ebft_core.config import RunConfig
from ebft_core.errors import ExitCode
from flows.environment import prefect_api, quiet_libraries
from flows.live_view import open_view
from flows.stopping import sigterm_as_interrupt
from flows.summary import print_summary
from tasks.observe import observing
from tasks.start_run import check_start
from tasks.supervise import StageFailed, StagePreempted


def run_pipeline(config: Path, overrides: Sequence[str], resolved: RunConfig) -> ExitCode:
    """Run the flow `ebft` and print its summary.

    Returns:
        0; 75 if the run was stopped and can be resumed; 70 if a stage failed.

    Raises:
        UserError: anything the user can mend.
    """
    plan, _ = check_start(resolved)  # whatever can be found wrong is found before a server is started
    quiet_libraries()
    sigterm_as_interrupt()
    notes = Console(stderr=True, soft_wrap=True, highlight=False)
    again = shlex.join(["ebft", "run", str(config), *(part for o in overrides for part in ("--set", o))])
    try:
        result = _run_flow(config, overrides, plan.workspace)
    except (KeyboardInterrupt, StagePreempted):
        notes.print(f"stopped; finished stages and checkpoints are kept. To resume:\n  {again}", markup=False)
        return ExitCode.PREEMPTED
    except StageFailed as error:
        notes.print(f"error: {error}\n  hint:     the same command goes on where it stopped", markup=False)
        return ExitCode.INTERNAL
    print_summary(Path(result["run_dir"]), Console(), flow_run=result["flow_run"])
    return ExitCode.DONE


def _run_flow(config: Path, overrides: Sequence[str], workspace: Path) -> dict[str, str]:
    with open_view(Console(stderr=True)) as view, contextlib.ExitStack() as servers, observing(view):
        with view.waiting("starting Prefect"):
            servers.enter_context(prefect_api(workspace))
            from flows.ebft import ebft
        return ebft(str(config), list(overrides))
