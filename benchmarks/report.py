"""The table that `make bench` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

GOALS = {
    "rollout_L256": 8.0,
    "rollout_L1024": 10.0,
    "step_L256": 3.2,
    "step_L1024": 4.8,
    "memory_L1024": 2.0,
}
PEAK_GOALS = {"rollout": 0.60, "features": 0.75, "update": 0.75}
GROWTH_GOAL = 1.15


def print_report(report: dict[str, Any], console: Console) -> None:
    """Headline figures with their goals, then the machine."""
    table = Table(title="strided step, paper setting", title_justify="left")
    for column in ("figure", "measured", "spread", "goal", ""):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name, value in report["ratios"].items():
        goal = GOALS.get(name)
        spread = _spread(report, name)
        table.add_row(
            f"baseline / product: {name}", f"{value:.2f}x", spread, _at_least(goal, "x"), _mark(value, goal)
        )
    for phase, value in report["fraction_of_peak"].items():
        goal = PEAK_GOALS[phase]
        table.add_row(f"share of peak: {phase}", f"{value:.0%}", "", f">= {goal:.0%}", _mark(value, goal))
    if "growth_exponent" in report:
        value = report["growth_exponent"]
        reached = "met" if value <= GROWTH_GOAL else "missed"
        table.add_row("growth exponent of time", f"{value:.2f}", "", f"<= {GROWTH_GOAL}", reached)
    for name, entry in report["parts"].get("overhead", {}).items():
        table.add_row(name, entry["text"], "", entry["goal"], entry["reached"])
    console.print(table)
    hardware, versions = report["hardware"], report["versions"]
    console.print(f"{hardware['processor']}, {hardware['cores']} cores, GPU {hardware['gpu']}")
    console.print(", ".join(f"{name} {number}" for name, number in versions.items()))


def _spread(report: dict[str, Any], name: str) -> str:
    phase, length = name.split("_")
    measured = report["parts"].get("steps", {}).get(length, {}).get("ratio", {}).get(phase)
    return "" if measured is None else f"{measured['min']:.2f} to {measured['max']:.2f}"


def _at_least(goal: float | None, unit: str) -> str:
    return "" if goal is None else f">= {goal:g}{unit}"


def _mark(value: float, goal: float | None) -> str:
    if goal is None:
        return ""
    return "met" if value >= goal else "missed"
