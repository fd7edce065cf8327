"""How a terminal follows the stages of a flow that runs in the same process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

Observer = Callable[[str, Mapping[str, Any]], None]
"""Called with a stage's name and an event: one of its journal's, or of kind `started`, `skipped`, `done`."""

_OBSERVER: ContextVar[Observer | None] = ContextVar("ebft_observer", default=None)


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Send the events of every stage that runs inside the block to `observer`."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


@contextlib.contextmanager
def labelled(label: str, shown: Callable[[str, str], bool]) -> Iterator[None]:
    """Put a label before the names of the stages that run inside the block: several runs, one view.

    `shown` says whether an event is handed on, from the stage's name and the event's kind.
    """
    outer = _OBSERVER.get()
    if outer is None:
        yield
        return

    def relabel(stage: str, event: Mapping[str, Any]) -> None:
        if shown(stage, event["kind"]):
            outer(f"{label} · {stage}", event)

    with observing(relabel):
        yield


def notify(stage: str, kind: str, **fields: Any) -> None:
    """Tell the observer, if there is one, about a stage."""
    forward(stage, {"kind": kind, **fields})


def forward(stage: str, event: Mapping[str, Any]) -> None:
    """Hand on an event of the stage's journal."""
    observer = _OBSERVER.get()
    if observer is not None:
        observer(stage, event)
