"""Colours and marks of `ebft preview`, and text that cannot steer the terminal."""

from __future__ import annotations

from rich.text import Text

ANCHOR = Text("▸", style="bold magenta")
SUPERVISED, TARGET_ONLY, CONTEXT, GIVEN = "green", "yellow", "dim", "cyan"


def legend(*, structured: bool) -> Text:
    """What the colours mean."""
    words: list[str | tuple[str, str] | Text] = [
        ("supervised", SUPERVISED),
        " · ",
        ("target without a label", TARGET_ONLY),
        " · ",
        ("context only", CONTEXT),
        " · ",
    ]
    if structured:
        words += [("given between turns, not written", GIVEN), " · "]
    words += [ANCHOR, " anchor: rollouts start here"]
    return Text.assemble(*words)


def visible(text: str) -> str:
    """Text with its control characters spelled out, so that a document cannot steer the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
