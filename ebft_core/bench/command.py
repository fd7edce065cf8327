"""What `ebft bench` does: measure the run's own model, print the table, suggest a setting."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from ebft_core.bench.measure import PHASES
from ebft_core.bench.suite import BenchReport, run_bench
from ebft_core.config import RunConfig
from ebft_core.stages.prepare_base import resolve_base


def bench(config: RunConfig, *, rounds: int, as_json: bool) -> None:
    """Run the suite and print it as a table, or as JSON on standard output.

    Raises:
        UserError: the model cannot be found or used, or the configuration does not fit the machine.
    """
    console = Console(stderr=True)
    with _model_folder(config) as folder, console.status("measuring") as status:
        report = run_bench(
            folder, config, rounds=rounds, report=lambda text: status.update(f"measuring {text}")
        )
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=1))
    else:
        _print(report, Console())


@contextmanager
def _model_folder(config: RunConfig) -> Iterator[Path]:
    """The base model's folder; a model made from scratch is measured with random weights."""
    scratch = config.model.from_scratch
    if scratch is None:
        yield resolve_base(config.model).path
        return
    from ebft_core.scratch.corpus import read_corpus
    from ebft_core.scratch.tokenizer import make_tokenizer
    from ebft_core.scratch.training import make_model

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(
            scratch, read_corpus(scratch.sources) if scratch.tokenizer == "bpe" else []
        )
        make_model(scratch, tokenizer).save_pretrained(folder)
        yield Path(folder)


def _print(report: BenchReport, console: Console) -> None:
    title = (
        f"one step of the run's model on {report.device}, {report.precision} (rollout / features / update)"
    )
    table = Table(title=title, title_justify="left")
    for column in (
        "micro batch",
        "attention",
        "seconds",
        "% of peak",
        "rollout tok/s",
        "step tok/s",
        "peak MB",
    ):
        table.add_column(column, justify="right")
    for row in report.rows:
        table.add_row(
            str(row.micro_batch_size),
            row.attention,
            " / ".join(f"{row.seconds[p]:.2f}" for p in PHASES),
            " / ".join(f"{100 * row.fraction_of_peak[p]:.0f}" for p in PHASES),
            f"{row.tokens_per_second['rollout']:,.0f}",
            f"{row.tokens_per_second['step']:,.0f}",
            f"{row.peak_memory_mb:,.0f}",
        )
    console.print(table)
    console.print(f"peak: {report.peak_flops / 1e9:,.0f} GFLOP/s (a large matrix product on this machine)")
    best = report.best
    console.print(
        f"suggestion: trainer.micro_batch_size: {best.micro_batch_size}, trainer.attention: {best.attention} "
        f"({best.tokens_per_second['step']:,.0f} generated tokens per second)"
    )
