"""What a run shows where nobody draws bars: one line per event, for files and CI."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from flows.vitals import Vitals

_EVERY_SECONDS = 5.0
_SHOWN = {"ebft/reward": "reward", "ebft/alignment": "alignment", "ebft/cfm": "cfm", "ebft/ce_loss": "ce"}


class PlainView:
    """One line per event, at most one every few seconds while a stage counts."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = 0.0
        self._vitals: defaultdict[str, Vitals] = defaultdict(Vitals)

    def __call__(self, stage: str, event: Mapping[str, Any]) -> None:
        """Show one event."""
        kind = event["kind"]
        if kind == "metrics":
            self._vitals[stage].feed(event)
            pace = self._vitals[stage].pace()
            self._count(stage, event["step"], event["total"], "  ".join([metrics_text(event), *pace]))
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
        if time.monotonic() - self._last >= _EVERY_SECONDS or done == total:
            self._last = time.monotonic()
            self._line(f"{stage}: {done}/{total if total is not None else '?'} {text}")

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def metrics_text(event: Mapping[str, Any]) -> str:
    """The few metrics that fit on a line; the loss where the usual ones are absent."""
    values = {name: float(value) for name, value in event["values"].items()}
    shown = [f"{label} {values[name]:.3f}" for name, label in _SHOWN.items() if name in values]
    if not shown:
        shown = [f"{name} {value:.3f}" for name, value in values.items() if "loss" in name][:1]
    return "  ".join(shown)
