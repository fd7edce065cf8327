"""What a person sees on a terminal while a run goes on: bars, vitals of the training, its last rollouts."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
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
from rich.table import Table
from rich.text import Text

from flows.plain_view import PlainView, metrics_text
from flows.vitals import Reading, Vitals

_WIDE, _HIGH = 110, 36
"""Columns from which on rollouts stand beside the vitals, and lines from which on they stand below."""
_SHOWN_CHARACTERS, _SHOWN_LINES = 160, 3


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
        speed_estimate_period=600.0,  # a step may take minutes
    )
    view = LiveView(progress)
    with Live(view, console=console, refresh_per_second=4, transient=False):
        yield view


class LiveView:
    """One bar per stage; under them the vitals of the stage that trains, and what it wrote last."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[str, TaskID] = {}
        self._vitals: defaultdict[str, Vitals] = defaultdict(Vitals)
        self._training: str | None = None
        self._samples: tuple[int, list[Mapping[str, Any]]] | None = None

    def __call__(self, stage: str, event: Mapping[str, Any]) -> None:
        """Show one event."""
        bar = self._bar(stage)
        kind = event["kind"]
        if kind == "started":
            self._start(stage, bar)
        elif kind == "metrics":
            self._note_metrics(stage, bar, event)
        elif kind == "samples":
            self._samples = event["step"], event["rows"]
        elif kind == "progress":
            self._progress.update(bar, completed=event["done"], total=event["total"], note=event["phase"])
        elif kind == "phase":
            self._progress.update(bar, note=event["phase"])
        elif kind in ("message", "failed"):
            self._print("dim", f"{stage}:", event["text"])
        elif kind == "warning":
            self._print("yellow", f"{stage}: warning:", event["text"])
        elif kind in ("done", "skipped"):
            self._finish(stage, bar, "done already" if kind == "skipped" else None)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A spinner that goes when the wait is over."""
        bar = self._progress.add_task(what, total=None, note="")
        try:
            yield
        finally:
            self._progress.remove_task(bar)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The whole view as it stands now."""
        parts: list[Any] = [self._progress]
        if self._training is not None:
            vitals = self._vitals[self._training]
            pace = Text("  ".join(vitals.pace()))
            panel = Panel(
                Group(pace, vitals_table(vitals)), title=self._training, subtitle=vitals.shares() or None
            )
            parts.append(self._with_samples(panel, options))
        yield Group(*parts)

    def _with_samples(self, panel: Panel, options: ConsoleOptions) -> RenderableType:
        """The rollouts beside the panel or below it; on a small terminal the panel alone."""
        if self._samples is None:
            return panel
        samples = samples_panel(*self._samples)
        if options.max_width >= _WIDE:
            return side_by_side(panel, samples)
        return Group(panel, samples) if options.size.height >= _HIGH else panel

    def _start(self, stage: str, bar: TaskID) -> None:
        """A stage may run again: in the next run of a sweep, or after a fault."""
        self._vitals.pop(stage, None)
        self._progress.reset(bar, note="")

    def _note_metrics(self, stage: str, bar: TaskID, event: Mapping[str, Any]) -> None:
        vitals = self._vitals[stage]
        vitals.feed(event)
        if any(vitals.readings()):
            self._training = stage
        note = "" if self._training == stage else metrics_text(event)
        if event["total"] is not None:  # an evaluation between two steps counts nothing
            self._progress.update(bar, completed=event["step"], total=event["total"], note=note)

    def _bar(self, stage: str) -> TaskID:
        if stage not in self._bars:
            self._bars[stage] = self._progress.add_task(stage, total=None, note="")
        return self._bars[stage]

    def _finish(self, stage: str, bar: TaskID, note: str | None) -> None:
        if self._training == stage:
            self._training = self._samples = None
        total = next((t.total for t in self._progress.tasks if t.id == bar), None) or 1
        self._progress.update(bar, total=total, completed=total)
        if note is not None:
            self._progress.update(bar, note=note)

    def _print(self, style: str, who: str, text: str) -> None:
        self._progress.console.print(Text.assemble((who, style), " ", text), soft_wrap=True)


def vitals_table(vitals: Vitals) -> Table:
    """Value, arrow and healthy range of each. Green and red: better and worse; yellow: out of range."""
    table = Table.grid(padding=(0, 2))
    for reading in vitals.readings():
        style = "yellow" if reading.inside is False else ""
        value = f"{round(reading.value, 9) + 0.0:.4g}"  # rounding errors of a zero are no number to read
        table.add_row(reading.vital.label, Text(value, style=style), _arrow(reading), _range(reading))
    return table


def samples_panel(step: int, rows: Sequence[Mapping[str, Any]]) -> Panel:
    """What stood before, what really follows, and the rollouts with their rewards."""
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("before", Text(_tail(rows[0]["context"]), style="dim"))
    table.add_row("truth", Text(_head(rows[0]["ground_truth"])))
    for row in rows:
        table.add_row(f"{row['reward']:+.3f}", Text(_head(row["sample"]), style="cyan"))
        for name, entry in row.get("columns", {}).items():
            table.add_row("", Text(_head(f"{name}: {entry}"), style="dim"))
    return Panel(table, title=f"rollouts of step {step}, with their rewards")


def side_by_side(left: Panel, right: Panel) -> Table:
    """Two panels in a row; the right one gets what the left one leaves."""
    grid = Table.grid(expand=True)
    grid.add_column()
    grid.add_column(ratio=1)
    grid.add_row(left, right)
    return grid


def _arrow(reading: Reading) -> Text:
    style = {True: "green", False: "red", None: "dim"}[reading.improves]
    return Text(reading.arrow, style=style)


def _range(reading: Reading) -> Text:
    healthy, better = reading.vital.healthy, reading.vital.better
    parts = [] if healthy is None else [f"healthy {healthy[0]:g} to {healthy[1]:g}"]
    if better is not None:
        parts.append("rising" if better == "higher" else "falling")
    return Text(", ".join(parts), style="dim")


def _printable(text: str) -> str:
    """What a model wrote could otherwise steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text.expandtabs(4))


def _head(text: str) -> str:
    text = _printable(text)
    short = "\n".join(text[:_SHOWN_CHARACTERS].splitlines()[:_SHOWN_LINES])
    return short if len(short) >= len(text.rstrip()) else f"{short}…"


def _tail(text: str) -> str:
    text = _printable(text)
    short = "\n".join(text[-_SHOWN_CHARACTERS:].splitlines()[-_SHOWN_LINES:])
    return short if len(short) >= len(text.rstrip()) else f"…{short}"
