"""Writes the measured figures of `benchmarks/baselines/cpu-2core.json` into the README and the guide.

    python -m benchmarks.tables

`make bench` runs it after measuring. The text between the marks `<!-- measured: begin -->` and
`<!-- measured: end -->` is replaced; a test fails where it is not what the file gives.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.report import GOALS, GROWTH_GOAL, PEAK_GOALS
from ebft_core.bench.measure import PHASES

ROOT = Path(__file__).parents[1]
BASELINE = ROOT / "benchmarks" / "baselines" / "cpu-2core.json"
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
TIMES = "\N{MULTIPLICATION SIGN}"
LABELS = {
    "rollout": "rollout",
    "features": "features and rewards",
    "update": "update",
    "step": "whole step",
}


def measured(report: dict[str, Any]) -> str:
    """The figures as Markdown."""
    hardware = report["hardware"]
    intro = (
        "One step in the paper's setting (stride, context and generation 8, N = 4), 28M-parameter Llama, "
        f"float32, {hardware['cores']} cores of an\n{hardware['processor']}: "
        "how many times faster than a plain implementation without prefix sharing "
        "(`benchmarks/full_recompute.py`, held to the same results\n"
        "by a test); median and range over rounds that take turns."
    )
    paragraphs = [intro, *_ratios(report), *_shares(report), *_others(report), *_missed(report)]
    return "\n\n".join(paragraphs)


def _ratios(report: dict[str, Any]) -> list[str]:
    steps = report["parts"].get("steps", {})
    if not steps:
        return []
    lengths = sorted(steps, key=_number)
    rows = [
        ["", *(f"L = {_number(length):,}" for length in lengths)],
        ["---"] * (len(lengths) + 1),
        *([LABELS[p], *(_ratio(steps[length]["ratio"][p]) for length in lengths)] for p in (*PHASES, "step")),
        ["seconds per step, ours / plain", *(_seconds(steps[length]["seconds"]) for length in lengths)],
    ]
    peaks = report["parts"].get("memory", {})
    if peaks:
        cells = [f"{peaks['ratio'][n]:.1f}{TIMES}" if n in peaks["ratio"] else "-" for n in lengths]
        rows.append(["peak memory of the process, plain / ours", *cells])
    return ["\n".join(_row(cells) for cells in rows)]


def _shares(report: dict[str, Any]) -> list[str]:
    shares = report["parts"].get("peak", {})
    if not shares:
        return []
    lines = []
    for length in sorted(shares, key=_number):
        reached = ", ".join(f"{phase} {shares[length][phase]['median']:.0%}" for phase in PHASES)
        lines.append(f"{reached} at L = {_number(length):,}")
    return [f"Share of the machine's matrix-product peak, linear layers only: {'; '.join(lines)}."]


def _others(report: dict[str, Any]) -> list[str]:
    parts, sentences = report["parts"], []
    if "growth" in parts:
        growth = parts["growth"]
        lengths = [row["length"] for row in growth["rows"]]
        sentences.append(
            f"From L = {min(lengths):,} to {max(lengths):,} (3M parameters) the time of a step grows with "
            f"the generated tokens to the power of {growth['time_exponent']:.2f},\n"
            f"its memory with the packed tokens to the power of {growth['memory_exponent']:.2f}."
        )
    overhead = parts.get("overhead", {})
    if overhead:
        listed = "; ".join(f"{name}: {entry['text']}" for name, entry in overhead.items())
        sentences.append(f"Beside the arithmetic: {listed}.")
    return ["\n".join(sentences)] if sentences else []


def _missed(report: dict[str, Any]) -> list[str]:
    """Goals that were missed, and those that nothing was measured for."""
    ratios, shares = report["ratios"], report["fraction_of_peak"]
    missed = [
        f"{n} {ratios[n]:.1f}{TIMES} of {goal:g}{TIMES}"
        for n, goal in GOALS.items()
        if ratios.get(n, goal) < goal
    ]
    missed += [
        f"share of the peak, {phase}: {shares[phase]:.0%} of {goal:.0%}"
        for phase, goal in PEAK_GOALS.items()
        if shares.get(phase, goal) < goal
    ]
    if report.get("growth_exponent", GROWTH_GOAL) > GROWTH_GOAL:
        missed.append(f"growth exponent {report['growth_exponent']:.2f}, at most {GROWTH_GOAL}")
    entries = report["parts"].get("overhead", {})
    missed += [f"{n} {e['text']}, goal {e['goal']}" for n, e in entries.items() if e["reached"] != "met"]
    absent = [
        name for name in ("steps", "memory", "peak", "growth", "overhead") if name not in report["parts"]
    ]
    sentences = [f"Goals missed: {'; '.join(missed)}."] if missed else []
    sentences += [f"Not recorded in the file yet: {', '.join(absent)}."] if absent else []
    return ["\n".join(sentences)] if sentences else []


def _ratio(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.1f}{TIMES} ({ratio['min']:.1f} to {ratio['max']:.1f})"


def _seconds(seconds: dict[str, dict[str, float]]) -> str:
    return f"{seconds['product']['step']:.1f} s / {seconds['baseline']['step']:.1f} s"


def _number(length: str) -> int:
    return int(length.removeprefix("L"))


def _row(cells: list[str]) -> str:
    return f"|{'|'.join(cells)}|" if cells[0] == "---" else f"| {' | '.join(cells)} |".replace("|  |", "| |")


def filled(page: str, text: str) -> str:
    """A page with the text between its marks.

    Raises:
        ValueError: the page has no marks, or several.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page needs {BEGIN} and {END} once each")
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n\n{text}\n\n{END}", page)


def main() -> None:
    """Rewrite the pages."""
    text = measured(json.loads(BASELINE.read_text(encoding="utf-8")))
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8"), text), encoding="utf-8")


if __name__ == "__main__":
    main()
