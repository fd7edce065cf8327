"""What `ebft gc` may remove: the rules, apart from where things lie."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, dataclass
from typing import Any

from ebft_core.config import RetentionConfig

DAY = 24 * 3600.0


@dataclass(frozen=True)
class KnownRun:
    """A run as its folder, or the folder's copy in the archive, tells of it.

    Attributes:
        folder: name of its folder.
        name: from its configuration.
        run_key: see `runs.py`.
        stages: stage -> key.
        started: seconds since the epoch.
        busy: whether it is going on, or may be.
    """

    folder: str
    name: str
    run_key: str
    stages: Mapping[str, str]
    started: float
    busy: bool


@dataclass(frozen=True)
class Garbage:
    """One thing that may be removed.

    Attributes:
        kind: `run`, `stage`, `work`, `leftover`, `source`, `copy`, `blob` or `upload`.
        name: relative to the workspace or to the archive.
        bytes: size, as far as it is known.
        why: for people.
        written: when it was last written, seconds since the epoch.
    """

    kind: str
    name: str
    bytes: int
    why: str
    written: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def kept_runs(
    runs: Iterable[KnownRun], rules: RetentionConfig, registered: Set[str], now: float
) -> list[KnownRun]:
    """The runs that a rule keeps: those that go on, young ones, the newest of a name, registered ones.

    Args:
        runs: all there are.
        rules: the section `retention`.
        registered: run keys of the models in the registry.
        now: seconds since the epoch.
    """
    by_name: dict[str, list[KnownRun]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.started, reverse=True):
        by_name[run.name].append(run)
    return [
        run
        for same_name in by_name.values()
        for place, run in enumerate(same_name)
        if run.busy
        or place < rules.keep_runs
        or now - run.started < DAY * rules.keep_days
        or run.run_key in registered
    ]


def needed_stages(runs: Iterable[KnownRun]) -> frozenset[tuple[str, str]]:
    """Name and key of every stage that belongs to one of the runs."""
    return frozenset((name, key) for run in runs for name, key in run.stages.items())
