"""The table at the end of a run: base | tuned | difference ± standard error."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ebft_core.bootstrap import PairedEstimate
from ebft_core.evaluation.summary import Evaluation
from ebft_core.metrics import metric_of


def print_table(evaluation: Evaluation, console: Console) -> None:
    """Print the comparison, and one with each further model.

    A verdict is given only where the interval leaves out zero.
    """
    console.print(_table("Held-out evaluation", "base", evaluation.metrics, _caption(evaluation)))
    for name, reference in evaluation.against.items():
        console.print(_table(f"Tuned model against {name}", name, reference.metrics, None))


def _table(title: str, other: str, metrics: Mapping[str, PairedEstimate], caption: str | None) -> Table:
    table = Table(title=title, title_justify="left", caption=caption)
    table.add_column("metric")
    for column in (other, "tuned", "difference ± s.e."):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name, estimate in metrics.items():
        if not math.isfinite(estimate.base):
            continue
        error = "" if math.isnan(estimate.standard_error) else f" ± {estimate.standard_error:.4f}"
        table.add_row(
            metric_of(name).label,
            f"{estimate.base:.4f}",
            f"{estimate.tuned:.4f}",
            f"{estimate.difference:+.4f}{error}",
            verdict(name, estimate),
        )
    return table


def verdict(name: str, estimate: PairedEstimate) -> Text:
    """`▼ better`, `▲ worse`, … or `-` where zero lies inside the interval."""
    low, high = estimate.interval
    if not (low > 0 or high < 0):
        return Text("-", style="dim")
    arrow = "▲" if estimate.difference > 0 else "▼"
    better = metric_of(name).better
    if better is None:
        return Text(arrow)
    improved = (estimate.difference > 0) == (better == "higher")
    return Text(f"{arrow} better", style="green") if improved else Text(f"{arrow} worse", style="red")


def _caption(evaluation: Evaluation) -> str:
    dropped = evaluation.dropped_base + evaluation.dropped_tuned
    if evaluation.mode == "structured":
        kind, samples = "prompts", f"with {evaluation.n_samples} completions each"
    else:
        kind, samples = "blocks", f"of {evaluation.n_samples} samples"
    return (
        f"{evaluation.rows} rows, {evaluation.documents} documents, {evaluation.tokens} tokens, "
        f"{evaluation.blocks} {kind} {samples}"
        + (f", {dropped} {kind} dropped" if dropped else "")
        + f"; paired bootstrap over documents, {evaluation.confidence:.0%} intervals"
    )
