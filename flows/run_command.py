"""The body of `ebft run`: the checks, the flow, the summary."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ebft_core.config import RunConfig
from ebft_core.errors import ExitCode
from flows.follow import follow
from flows.json_logs import write_note
from flows.summary import print_summary, summarise_run
from tasks.start_run import check_start


def run_pipeline(
    config: Path, overrides: Sequence[str], resolved: RunConfig, *, json_logs: bool = False
) -> ExitCode:
    """Run the flow `ebft` and print its summary.

    Raises:
        UserError: anything the user can mend.
        SystemExit: the run ended early (see `follow`).
    """
    plan, _ = check_start(resolved)  # whatever can be found wrong is found before a server is started
    again = shlex.join(["ebft", "run", str(config), *(part for o in overrides for part in ("--set", o))])

    def run_flow() -> dict[str, str]:
        from flows.ebft import ebft

        return ebft(str(config), list(overrides))

    result = follow(run_flow, workspace=plan.workspace, again=again, json_logs=json_logs)
    summary = summarise_run(Path(result["run_dir"]), flow_run=result["flow_run"])
    if json_logs:
        write_note("result", **summary.to_json())
    else:
        print_summary(summary, Console())
    return ExitCode.DONE
