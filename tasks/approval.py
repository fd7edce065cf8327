"""A person's word before a model becomes the champion: the flow pauses and Prefect's page shows a form."""

from __future__ import annotations

from dataclasses import replace

from prefect.client.orchestration import get_client
from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.settings import PREFECT_UI_URL
from prefect.states import Running
from pydantic import Field

from ebft_core.promotion import Decision
from tasks.observe import notify

_LOOK_EVERY_SECONDS = 10


class Approval(RunInput):
    """The form in Prefect's page of the paused run."""

    approve: bool = Field(default=False, description="Make this model the champion")
    by: str = Field(title="Your name", min_length=1, description="It is noted on the model's version")
    comment: str = Field(default="", description="Why; it is noted, too")


def ask(decision: Decision, what: str, timeout_hours: float) -> tuple[Decision, str]:
    """Pause the flow until somebody answers. To be called from a flow, not from a task.

    Args:
        decision: of the gate, to promote.
        what: the challenger, for people.

    Returns:
        The decision as it stands after the answer, and who made it. No answer within `timeout_hours` refuses.
    """
    seconds = int(timeout_hours * 3600)
    page = f"{PREFECT_UI_URL.value()}/runs/flow-run/{flow_run.id}"
    waits = f"{what} waits for approval, for {timeout_hours:g} hours: {page}"
    get_run_logger().info("%s", waits)
    notify("promote", "message", text=waits)
    form = Approval.with_initial_data(description=_description(decision, what, timeout_hours))
    try:
        answer = pause_flow_run(wait_for_input=form, timeout=seconds, poll_interval=_LOOK_EVERY_SECONDS)
    except FlowPauseTimeout:
        _go_on()
        reason = f"refused: nobody approved it within {timeout_hours:g} hours"
        return replace(decision, promote=False, reason=reason), "nobody"
    said = f": {answer.comment}" if answer.comment else ""
    if not answer.approve:
        return replace(decision, promote=False, reason=f"refused by {answer.by}{said}"), answer.by
    return replace(decision, reason=f"{decision.reason}; approved by {answer.by}{said}"), answer.by


def _go_on() -> None:
    """The pause is over without an answer; the run itself is not."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run.id, Running(), force=True)


def _description(decision: Decision, what: str, timeout_hours: float) -> str:
    checks = "\n".join(f"* {check.text}" for check in decision.checks)
    return (
        f"**{what}** passed the gate and waits to become the champion.\n\n{checks}\n\n"
        f"Without an answer within {timeout_hours:g} hours it is refused and the champion stays."
    )
