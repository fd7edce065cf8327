"""The figures in the README and the guide are those of the baseline file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import tables


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda path: path.name)
def test_pages_hold_what_the_baseline_file_gives(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    report = json.loads(tables.BASELINE.read_text(encoding="utf-8"))
    assert tables.filled(text, tables.measured(report)) == text, "run python -m benchmarks.tables"


def test_a_report_becomes_a_table_with_what_was_missed_and_left_out() -> None:
    seconds = {"product": {"step": 2.0}, "baseline": {"step": 9.0}}
    ratio = {"median": 4.5, "min": 4.25, "max": 5.0}
    share = {"median": 0.5, "min": 0.4, "max": 0.6}
    phases = ("rollout", "features", "update")
    report = {
        "hardware": {"cores": 2, "processor": "Z80"},
        "ratios": {"rollout_L256": 4.5, "step_L256": 4.5},
        "fraction_of_peak": {"rollout": 0.5, "features": 0.8, "update": 0.8},
        "parts": {
            "steps": {"L256": {"seconds": seconds, "ratio": dict.fromkeys((*phases, "step"), ratio)}},
            "memory": {"peak_mb": {}, "ratio": {"L256": 1.42}},
            "peak": {"L256": dict.fromkeys(phases, share)},
        },
    }
    lines = tables.measured(report).splitlines()
    times = tables.TIMES
    assert f"| whole step | 4.5{times} (4.2 to 5.0) |" in lines
    assert "| seconds per step, ours / plain | 2.0 s / 9.0 s |" in lines
    assert f"| peak memory of the process, plain / ours | 1.4{times} |" in lines
    assert (
        f"Goals missed: rollout_L256 4.5{times} of 8{times}; share of the peak, rollout: 50% of 60%." in lines
    )
    assert "Not recorded in the file yet: growth, overhead." in lines


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="once each"):
        tables.filled("no marks", "text")
