"""`--json-logs`: one JSON object per line on standard output, for machines that read along."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from ebft_core.errors import UserError

JsonLogsOption = Annotated[
    bool,
    typer.Option("--json-logs", help="Print one JSON object per event and line instead of the live view."),
]


class JsonView:
    """A `View` of lines: the events of the journals as they are, and what the command adds to them."""

    def __call__(self, stage: str, event: Mapping[str, Any]) -> None:
        """Print one event."""
        write_line({"time": time.time(), "stage": stage, **event})

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Say it once."""
        write_note("message", text=what)
        yield

    def refused(self, error: UserError) -> None:
        """Print an error of the user's."""
        write_note("error", error=error.to_json())


def write_note(kind: str, **fields: Any) -> None:
    """Print a line that belongs to no stage."""
    write_line({"time": time.time(), "stage": None, "kind": kind, **fields})


def write_line(document: Mapping[str, Any]) -> None:
    """Print one object, at once: whoever reads along must not wait for a buffer."""
    sys.stdout.write(json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()
