"""The one shape of an error that a user can cause: what, where, value, expected, hint.

Also the exit codes of every stage program, which the supervisor reads to decide about a retry.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """What a stage program says to its parent by its exit status."""

    DONE = 0
    INTERNAL = 70  # a bug, a diverged run, or a machine fault: may be retried
    PREEMPTED = 75  # stopped on request with a good checkpoint: a retry resumes
    BAD_INPUT = 78  # config or data: never retried


class UserError(Exception):
    """Something a user can mend.

    Args:
        what: one sentence that says what is wrong.
        where: config key path (`ebft.stride`), or `file:line`.
        value: the value given; the caller redacts secrets.
        expected: what would have been accepted.
        hint: the next thing to try.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        value: object = None,
        expected: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.value = value
        self.expected = expected
        self.hint = hint
        super().__init__(self.render())

    def render(self) -> str:
        """The error as the user sees it: one line per part, empty parts left out."""
        lines = [f"error: {self.what}"]
        if self.where:
            lines.append(f"  where:    {self.where}")
        if self.value is not None:
            lines.append(f"  value:    {_shorten(self.value)}")
        if self.expected:
            lines.append(f"  expected: {self.expected}")
        if self.hint:
            lines.append(f"  hint:     {self.hint}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, str | None]:
        """The parts as JSON, for the event stream and Prefect."""
        return {
            "what": self.what,
            "where": self.where,
            "value": None if self.value is None else _shorten(self.value),
            "expected": self.expected,
            "hint": self.hint,
        }


class UserErrors(UserError):  # noqa: N818 (several errors, one type)
    """Several user errors found in one pass, shown together."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        self.errors = list(errors)
        first = self.errors[0]
        super().__init__(
            first.what, where=first.where, value=first.value, expected=first.expected, hint=first.hint
        )

    def render(self) -> str:
        """Every error, one after the other."""
        return "\n".join(error.render() for error in getattr(self, "errors", []) or [super()])


def _shorten(value: object, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
