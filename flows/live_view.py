"""What a person sees while `ebft run` runs: bars on a terminal, plain lines in a file or in CI."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_PLAIN_EVERY_SECONDS = 5.0
_SHOWN_METRICS = {"ebft/cfm": "cfm", "ebft/alignment": "alignment", "ebft/ce_loss": "ce"}


class View(Protocol):
    """Takes the events of all stages (see `tasks.observe`)."""

    def __call__(self, stage: str, event: Mapping[str, Any]) -> None:
        """Show one event."""

    def waiting(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Show that something without steps takes a while."""


@contextlib.contextmanager
def open_view(console: Console) -> Iterator[View]:
    """The view that suits the console."""
    if not console.is_terminal:
        yield PlainView(console)
        return
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", style="bold"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[note]}", style="dim"),
        console=console,
    )
    with progress:
        yield BarView(progress)


class BarView:
    """One bar per stage."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[str, TaskID] = {}

    def __call__(self, stage: str, event: Mapping[str, Any]) -> None:
        """Show one event."""
        bar = self._bar(stage)
        kind = event["kind"]
        if kind == "metrics":
            self._progress.update(
                bar, completed=event["step"], total=event["total"], note=metrics_text(event)
            )
        elif kind == "progress":
            self._progress.update(bar, completed=event["done"], total=event["total"], note=event["phase"])
        elif kind == "phase":
            self._progress.update(bar, note=event["phase"])
        elif kind in ("message", "failed"):
            self._progress.console.print(f"[dim]{stage}:[/dim] {event['text']}", highlight=False)
        elif kind == "warning":
            self._progress.console.print(
                f"[yellow]{stage}: warning:[/yellow] {event['text']}", highlight=False
            )
        elif kind in ("done", "skipped"):
            self._finish(bar, "done already" if kind == "skipped" else None)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A spinner that goes when the wait is over."""
        bar = self._progress.add_task(what, total=None, note="")
        try:
            yield
        finally:
            self._progress.remove_task(bar)

    def _bar(self, stage: str) -> TaskID:
        if stage not in self._bars:
            self._bars[stage] = self._progress.add_task(stage, total=None, note="")
        return self._bars[stage]

    def _finish(self, bar: TaskID, note: str | None) -> None:
        total = next((t.total for t in self._progress.tasks if t.id == bar), None) or 1
        self._progress.update(bar, total=total, completed=total)
        if note is not None:
            self._progress.update(bar, note=note)


class PlainView:
    """One line per event, at most one every few seconds while a stage counts."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = 0.0

    def __call__(self, stage: str, event: Mapping[str, Any]) -> None:
        """Show one event."""
        kind = event["kind"]
        if kind == "metrics":
            self._count(stage, event["step"], event["total"], metrics_text(event))
        elif kind == "progress":
            self._count(stage, event["done"], event["total"], f"{event['unit']} {event['phase']}")
        elif kind == "phase":
            self._line(f"{stage}: {event['phase']}")
        elif kind in ("message", "failed"):
            self._line(f"{stage}: {event['text']}")
        elif kind == "warning":
            self._line(f"{stage}: warning: {event['text']}")
        elif kind in ("started", "done"):
            self._line(f"{stage}: {kind}")
        elif kind == "skipped":
            self._line(f"{stage}: done already")

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Say it once."""
        self._line(what)
        yield

    def _count(self, stage: str, done: int, total: int | None, text: str) -> None:
        if time.monotonic() - self._last >= _PLAIN_EVERY_SECONDS or done == total:
            self._last = time.monotonic()
            self._line(f"{stage}: {done}/{total if total is not None else '?'} {text}")

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def metrics_text(event: Mapping[str, Any]) -> str:
    """The few metrics that fit on a line; the loss where the usual ones are absent."""
    values = {name: float(value) for name, value in event["values"].items()}
    shown = [f"{label} {values[name]:.3f}" for name, label in _SHOWN_METRICS.items() if name in values]
    if not shown:
        shown = [f"{name} {value:.3f}" for name, value in values.items() if "loss" in name][:1]
    return "  ".join(shown)
