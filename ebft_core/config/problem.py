"""What a rule between keys yields when it is broken."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """A broken rule. `keys` are the dotted paths involved, the one to point at first."""

    keys: tuple[str, ...]
    what: str
    value: object = None
    expected: str | None = None
    hint: str | None = None
