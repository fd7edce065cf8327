"""One line of the doctor's table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from ebft_core.errors import UserError

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """What was looked at, and what it means for a run.

    Args:
        name: short, the same on every machine.
        verdict: `fail`: a run would not start or not end; `warn`: it may surprise.
        detail: what was found.
        hint: what to do; None where there is nothing to do.
    """

    name: str
    verdict: Verdict
    detail: str
    hint: str | None = None

    def to_json(self) -> dict[str, str | None]:
        """Plain values for JSON."""
        return asdict(self)


def guarded(name: str, look: Callable[[], Check]) -> Check:
    """The result of `look`; an error that the user can mend is a failed check, not the end of all."""
    try:
        return look()
    except UserError as error:
        where = f" ({error.where})" if error.where else ""
        value = "" if error.value is None else f": {error.value}"
        return Check(name, "fail", f"{error.what}{where}{value}", error.hint or error.expected)
