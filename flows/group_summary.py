"""The end of `ebft compare` and `ebft sweep`: the table of arms, the answer, and where everything is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ebft_core.arm_group import read_group
from ebft_core.comparison import ArmsComparison
from ebft_core.metrics import metric_of
from ebft_core.runs import read_plan
from flows.summary import service_places
from tasks.comparison_report import arm_rows, columns, read_comparison

_STYLES = {"better": "green", "worse": "red"}


def print_group(run_dir: Path, result: Mapping[str, Any], console: Console) -> None:
    """Print the arms with their differences from the base, the failed ones, the answer, and paths.

    Args:
        result: what the flow returned.
    """
    plan = read_plan(run_dir)
    comparison = read_comparison(plan)
    console.print(arms_table(comparison))
    for name, reason in result["failed"].items():
        console.print(f"failed: {name}: {reason}", style="red", highlight=False, markup=False)
    console.print(comparison.answer, highlight=False, markup=False, style="bold")
    places = {"report": result["report"], "runs": str(plan.run_dir.parent)}
    if comparison.best in comparison.arms:
        places["best"] = read_group(run_dir)["arms"][comparison.best]["run_dir"]
    places |= service_places(plan, result["flow_run"])
    for name, value in places.items():
        console.print(f"{name:<12} {value}", highlight=False, soft_wrap=True, markup=False)


def arms_table(comparison: ArmsComparison) -> Table:
    """Each metric of each arm with its difference from the base; the best arm has a star.

    Arms are rows or columns, whichever makes the table narrower.
    """
    caption = f"every arm: {comparison.budget}; below each value its difference from the base ± s.e."
    rows = arm_rows(comparison)
    lines = [f"{row['arm']} ★" if row["best"] else str(row["arm"]) for row in rows]
    headings = [metric_of(name).label for name in columns(comparison)]
    cells = [[_cell(cell) for cell in row["cells"]] for row in rows]
    if len(headings) > len(lines):
        lines, headings = headings, lines
        cells = [list(column) for column in zip(*cells, strict=True)]
    table = Table(title="Arms on the same held-out rows", title_justify="left", caption=caption)
    for heading in ("", *headings):
        table.add_column(Text(heading), justify="right" if heading else "left")
    for name, line in zip(lines, cells, strict=True):
        table.add_row(Text(name), *line)
    return table


def _cell(cell: Mapping[str, str]) -> Text:
    text = Text(cell["value"])
    if cell["change"]:
        style = next((style for word, style in _STYLES.items() if word in cell["verdict"]), "dim")
        text.append(f"\n{cell['change']} {cell['verdict']}", style=style)
    return text
