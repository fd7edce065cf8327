"""The verdict on a program: what it reported, held against what its tests expect."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ebft_core.config import SandboxConfig
from ebft_core.errors import UserError
from ebft_core.evaluation.sandbox.bubblewrap import Outcome, SandboxError, run_sandboxed
from ebft_core.evaluation.sandbox.checks import Checks, parse_tests


@dataclass(frozen=True)
class Verdict:
    """Whether a program passed its tests; if not, `reason` is the first thing that went wrong."""

    passed: bool
    reason: str = ""


def check_sandbox() -> None:
    """Try the sandbox out. Raises UserError with the reason where there is none."""
    if shutil.which("bwrap") is None:
        raise UserError(
            "generated programs run in a sandbox only, and bubblewrap is not installed",
            where="evaluate.tasks",
            expected="the command `bwrap`",
            hint="install it (`apt-get install bubblewrap`), or leave out the tasks of type pass_at_k",
        )
    try:
        reason = run_tests("answer = 42", parse_tests("assert answer == 42"), SandboxConfig()).reason
    except SandboxError as error:
        reason = str(error)
    if reason:
        raise UserError(
            "generated programs run in a sandbox only, and none can be made here",
            where="evaluate.tasks",
            value=reason,
            expected="bubblewrap 0.7 or newer, and user namespaces",
            hint="switch user namespaces on (sysctl kernel.unprivileged_userns_clone=1, "
            "kernel.apparmor_restrict_unprivileged_userns=0; a container must allow them too), "
            "or leave out the tasks of type pass_at_k",
        )


def run_tests(program: str, checks: Checks, bounds: SandboxConfig) -> Verdict:
    """Run a generated program and its tests in the sandbox.

    Raises:
        SandboxError: the sandbox did not come up, which is nothing the program could be blamed for.
    """
    return judge(run_sandboxed(program, checks, bounds), checks)


def judge(outcome: Outcome, checks: Checks) -> Verdict:
    """Passed: every assertion was reached and held each time, and the tests ran to their end."""
    try:
        reason = _problem(outcome, checks)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        reason = f"the reports cannot be read: {error}"  # somebody else than the harness wrote them
    return Verdict(passed=reason is None, reason=reason or "")


def _problem(outcome: Outcome, checks: Checks) -> str | None:
    if outcome.end == "flooded":
        return "reported too much"
    reached, ended = set(), False
    for report in _reports(outcome.reports):
        if report["event"] == "error":
            return str(report["text"])
        if report["event"] == "check":
            check = checks.checks[report["number"]]
            if not check.holds(report["left"], report["right"]):
                return f"does not hold: {check.text}"
            reached.add(report["number"])
        ended = report["event"] == "end"
    if not ended:
        return _end_of(outcome)
    missed = [
        check.text for number, check in enumerate(checks.checks) if check.required and number not in reached
    ]
    return f"was never reached: {missed[0]}" if missed else None


def _reports(data: bytes) -> Iterator[dict[str, Any]]:
    """The whole lines."""
    for line in data.splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield json.loads(line)


def _end_of(outcome: Outcome) -> str:
    if outcome.end == "timeout":
        return "out of time"
    return f"ended before its tests did, with status {outcome.status}"
