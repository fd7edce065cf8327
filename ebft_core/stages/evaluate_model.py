"""Stage `evaluate`: base, tuned and further models on held-out rows, the run's own or frozen ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, islice
from typing import Any

from ebft_core.base_model import read_base
from ebft_core.data.heldout import HELDOUT, frozen_heldout
from ebft_core.data.stop_tokens import read_stop_token_ids
from ebft_core.data.store import read_rows
from ebft_core.evaluation import Comparison, compare_models
from ebft_core.evaluation.records import AnswerRecord
from ebft_core.evaluation.sampling import Row
from ebft_core.manifests import write_json_atomic
from ebft_core.stage_runner import Preempted, StageContext
from ebft_core.tokenizer import load_tokenizer

EVALUATION_FILE = "evaluation.json"
ROLLOUTS_FILE = "rollouts.json"
ROLLOUTS_SCHEMA = "ebft.rollouts/1"
ANSWERS_FILE = "answers.json"
ANSWERS_SCHEMA = "ebft.answers/1"


def run(context: StageContext) -> dict[str, Any]:
    """Write `evaluation.json` (schema in `evaluation/summary.py`), `rollouts.json` and `answers.json`.

    Raises:
        UserError: no usable held-out row, or models and rows of different tokenizers.
        Preempted: asked to stop.
    """
    config = context.config
    base = read_base(context.inputs["prepare_base"])
    rows, stop_token_ids = heldout_rows(context)
    context.events.phase("evaluate")
    comparison = compare_models(
        base.path,
        context.inputs["merge"] / "model",
        rows,
        config,
        stop_token_ids=stop_token_ids,
        progress=progress_of(context),
    )
    write_json_atomic(context.output / EVALUATION_FILE, comparison.evaluation.to_json())
    write_json_atomic(context.output / ROLLOUTS_FILE, rollouts_document(comparison))
    count = config.evaluate.sample_rollouts
    write_json_atomic(context.output / ANSWERS_FILE, answers_document(comparison, count))
    metrics = comparison.evaluation.metrics
    return {name: metrics[name].to_json() for name in metrics}


def heldout_rows(context: StageContext) -> tuple[Sequence[Row], Sequence[int]]:
    """The run's own held-out rows or the frozen ones, and the tokens that end a completion (if structured).

    Raises:
        UserError: the frozen rows are damaged, or of another tokenizer.
    """
    config = context.config
    base = read_base(context.inputs["prepare_base"])
    frozen = frozen_heldout(config, load_tokenizer(base.path, config.model))
    tokenized = frozen or context.inputs["tokenize"]
    structured = config.ebft.mode == "structured"
    return read_rows(tokenized / HELDOUT), read_stop_token_ids(tokenized) if structured else ()


def progress_of(context: StageContext) -> Callable[[int, int], None]:
    """A callback (rows done, in all) that reports to the journal, and raises Preempted if asked to stop."""

    def progress(done: int, total: int) -> None:
        if context.stop.requested:
            raise Preempted(f"stopped while evaluating: {context.stop.reason}")
        context.events.progress("evaluate", done, total, "rows")

    return progress


def rollouts_document(comparison: Comparison) -> dict[str, Any]:
    """The examples as JSON: a list of `RolloutExample`s under `rollouts`."""
    return {"schema": ROLLOUTS_SCHEMA, "rollouts": [example.to_json() for example in comparison.examples]}


def answers_document(comparison: Comparison, count: int) -> dict[str, Any]:
    """The answers of both models to the first `count` problems of every task, as `AnswerRecord`s."""

    def first(records: Sequence[AnswerRecord]) -> list[dict[str, Any]]:
        tasks = groupby(records, key=lambda record: record.task)
        return [record.to_json() for _, group in tasks for record in islice(group, count)]

    return {
        "schema": ANSWERS_SCHEMA,
        "base": first(comparison.base_answers),
        "tuned": first(comparison.tuned_answers),
    }
