"""The event journal of a stage: one JSON object per line, appended and flushed at once.

The journal is the only channel from a stage program to the outside. Whoever watches (Prefect task,
MLflow tracker, terminal, report) reads the file, so nothing is lost while a watcher is away.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

EventKind = Literal["metrics", "progress", "message", "error", "samples", "phase", "warning"]


class EventWriter:
    """Appends the events of one stage to a journal.

    Args:
        path: the journal; None drops every event (library use and tests).
        stage: name written into every event.
    """

    def __init__(self, path: Path | None, stage: str) -> None:
        self.path = path
        self.stage = stage
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _end_torn_line(path)

    def metrics(self, step: int, values: Mapping[str, float], total: int | None = None) -> None:
        """Numbers of one step; `total` is the last step, for progress bars."""
        self._emit("metrics", step=step, total=total, values={k: _plain(v) for k, v in values.items()})

    def progress(self, phase: str, done: int, total: int, unit: str) -> None:
        """`done` of `total` units of a phase that has no metrics."""
        self._emit("progress", phase=phase, done=done, total=total, unit=unit)

    def phase(self, phase: str) -> None:
        """A new phase of the stage begins."""
        self._emit("phase", phase=phase)

    def message(self, text: str) -> None:
        """One line for people."""
        self._emit("message", text=text)

    def warning(self, text: str, *, name: str, step: int, numbers: str, fix: str) -> None:
        """Training looks ill: `name` is what `health.stop_on` calls it; `text` says it all in one line."""
        self._emit("warning", name=name, step=step, text=text, numbers=numbers, fix=fix)

    def error(self, payload: Mapping[str, Any]) -> None:
        """Why the stage stops, as `UserError.to_json` gives it."""
        self._emit("error", error=dict(payload))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rollouts for people to read."""
        self._emit("samples", step=step, rows=[dict(row) for row in rows])

    def _emit(self, kind: EventKind, **fields: Any) -> None:
        if self.path is None:
            return
        event = {"time": time.time(), "stage": self.stage, "kind": kind, **fields}
        line = json.dumps(event, ensure_ascii=False, allow_nan=False) + "\n"
        with open(self.path, "ab", buffering=0) as stream:  # one write call: lines never interleave
            stream.write(line.encode())


class EventReader:
    """Reads a journal from where it stopped last time; the file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Every complete new event. A line torn by a killed writer is passed over."""
        try:
            with open(self.path, "rb") as stream:
                stream.seek(self.offset)
                lines = stream.readlines()
        except FileNotFoundError:
            return
        for line in lines:
            if not line.endswith(b"\n"):
                return  # still being written
            self.offset += len(line)
            event = _parse(line)
            if event is not None:
                yield event


def read_events(path: Path) -> list[dict[str, Any]]:
    """All complete events of a journal; none if there is no file."""
    return list(EventReader(path).read())


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "kind" in event else None


def _plain(value: float) -> float | str:
    """JSON has no NaN; `float("nan")` reads the string back."""
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _end_torn_line(path: Path) -> None:
    """Close the half line a killed writer may have left, so that the next event stands alone."""
    with open(path, "ab+") as stream:
        if stream.tell() == 0:
            return
        stream.seek(-1, os.SEEK_END)
        if stream.read(1) != b"\n":
            stream.write(b"\n")
