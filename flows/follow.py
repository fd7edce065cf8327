"""What a command that runs a flow has around it: a Prefect server, a view, one message at an early end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from ebft_core.errors import ExitCode, UserError
from flows.environment import prefect_api
from flows.json_logs import JsonView, write_note
from flows.live_view import View, open_view
from flows.stopping import sigterm_as_interrupt
from tasks.observe import observing
from tasks.supervise import StageFailed, StagePreempted

Result = TypeVar("Result")


def follow(run_flow: Callable[[], Result], *, workspace: Path, again: str, json_logs: bool) -> Result:
    """Run a flow in this process and show what happens.

    Args:
        run_flow: imports the flow and calls it; Prefect must not be imported before it has a server.
        workspace: of the run; its own Prefect database lies there.
        again: the command line that goes on where this one stopped.
        json_logs: JSON lines on standard output instead of bars or plain lines on standard error.

    Returns:
        What the flow returned.

    Raises:
        UserError: anything the user can mend.
        SystemExit: 75, the run was stopped and can be resumed; 70, a stage failed.
    """
    sigterm_as_interrupt()
    try:
        with _view(json_logs) as view, contextlib.ExitStack() as servers, observing(view):
            with view.waiting("starting Prefect"):
                servers.enter_context(prefect_api(workspace))
            return run_flow()
    except (KeyboardInterrupt, StagePreempted):
        text = f"stopped; finished stages and checkpoints are kept. To resume:\n  {again}"
        _say("stopped", text, json_logs)
        raise SystemExit(int(ExitCode.PREEMPTED)) from None
    except StageFailed as error:
        _say("failed", f"error: {error}\n  hint:     the same command goes on where it stopped", json_logs)
        raise SystemExit(int(ExitCode.INTERNAL)) from None


@contextlib.contextmanager
def _view(json_logs: bool) -> Iterator[View]:
    if not json_logs:
        with open_view(Console(stderr=True)) as view:
            yield view
        return
    lines = JsonView()
    try:
        yield lines
    except UserError as error:
        lines.refused(error)
        raise


def _say(kind: str, text: str, json_logs: bool) -> None:
    if json_logs:
        write_note(kind, text=text)
    else:
        Console(stderr=True, soft_wrap=True, highlight=False).print(text, markup=False)
