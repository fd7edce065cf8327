"""Stage `tokenize`: source files become training and held-out rows of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ebft_core.base_model import embedding_size, read_base
from ebft_core.data.pipeline import DataPipeline, Result
from ebft_core.data.remote import remote_of
from ebft_core.data.scan import write_quarantine
from ebft_core.data.sources import digest_sources
from ebft_core.errors import UserError
from ebft_core.manifests import digest_json, write_json_atomic
from ebft_core.runs import read_plan
from ebft_core.tokenizer import load_tokenizer, vocabulary_digest

PLAN = "plan.json"

if TYPE_CHECKING:
    from ebft_core.stage_runner import StageContext


def run(context: StageContext) -> dict[str, Any]:
    """Write `train/`, `heldout/`, `data.json` and, if there are bad rows, `quarantine.jsonl`.

    Raises:
        UserError: see `DataPipeline.write`.
        Preempted: asked to stop; nothing is kept, the next attempt starts over.
    """
    base = read_base(context.inputs["prepare_base"])
    tokenizer = load_tokenizer(base.path, context.config.model)
    pipeline = DataPipeline(
        context.config, tokenizer, embedding_size(base.path), events=context.events, stop=context.stop
    )
    result = pipeline.write(context.output, context.work)
    _check_unchanged(context)
    write_quarantine(context.output / "quarantine.jsonl", result.bad)
    report = {**_report(result), "vocabulary": vocabulary_digest(tokenizer)}
    if pipeline.maker is not None:
        report |= {"truncated": result.truncated, "stop_token_ids": pipeline.maker.stop_ids}
    write_json_atomic(context.output / "data.json", report)
    left_out = (
        f"{report['dropped_too_short']} pieces too short"
        if pipeline.maker is None
        else f"{result.truncated} ground truths truncated"
    )
    context.events.message(
        f"data: {report['train']['rows']:,} training rows, {report['heldout']['rows']:,} held-out rows, "
        f"{report['tokens']:,} tokens, {report['quarantined']} quarantined, {left_out}"
    )
    return report


def _check_unchanged(context: StageContext) -> None:
    """The stage's key holds the digest of the data at planning time, so the data must still be the same."""
    if not (context.run_dir / PLAN).is_file():
        return  # called without a plan: there is no key to protect
    now = digest_sources(context.config.data.sources, remote_of(context.config))
    if now != read_plan(context.run_dir).data_digest:
        raise UserError(
            "the data changed while the run was going on",
            where="data.sources",
            hint="start the same run again when the files are no longer being written",
        )


def _report(result: Result) -> dict[str, Any]:
    train, heldout = result.sides["train"], result.sides["heldout"]
    return {
        "documents": result.rows - len(result.bad) - result.excluded,
        "excluded": result.excluded,
        "tokens": train["tokens"] + heldout["tokens"],
        "quarantined": len(result.bad),
        "dropped_too_short": result.dropped.pieces,
        "dropped_documents": result.dropped.documents,
        "train": train,
        "heldout": heldout,
        "digest": digest_json([train["digest"], heldout["digest"]]),
    }
