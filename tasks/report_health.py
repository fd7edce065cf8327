"""The warnings of a run's training, as rows of the report."""

from __future__ import annotations

from pathlib import Path

from ebft_core.events import read_events


def health_rows(run_dir: Path) -> list[dict[str, str]]:
    """One row per warning, in order: step, what, numbers, what to do. None: training was well."""
    events = read_events(run_dir / "events" / "train.jsonl")
    return [
        {
            "step": str(event["step"]),
            "name": event["name"].replace("_", " "),
            "numbers": event["numbers"],
            "fix": event["fix"],
        }
        for event in events
        if event["kind"] == "warning"
    ]
