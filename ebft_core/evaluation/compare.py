"""Compare two models on the same held-out rows, and evaluate a policy while it is being trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ebft_core.bootstrap import paired_bootstrap
from ebft_core.config import EvaluateConfig, RunConfig
from ebft_core.errors import UserError
from ebft_core.evaluation.measure import Row, document_at, evaluate_rows
from ebft_core.evaluation.metrics import METRICS, document_sums, documents_of, metric_means
from ebft_core.evaluation.records import Measurements
from ebft_core.evaluation.summary import Evaluation, RolloutExample
from ebft_core.models import (
    load_causal_lm,
    load_tokenizer,
    select_attention,
    select_device,
    select_precision,
)
from ebft_core.rows import row_anchors

CONTEXT_TOKENS = 48
"""Tokens shown before an example's anchor."""


@dataclass(frozen=True)
class Comparison:
    """The numbers, and some rollouts to look at."""

    evaluation: Evaluation
    examples: Sequence[RolloutExample]


def compare_models(
    base_path: Path,
    tuned_path: Path,
    heldout: Sequence[Row],
    config: RunConfig,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Evaluate base and tuned model on the same rows with the same random numbers.

    The feature network of both is the base model. Both models are in memory during the second half.

    Args:
        base_path, tuned_path: model folders with the same tokenizer.
        heldout: the tokenized held-out rows (a `datasets.Dataset` will do).
        config: sections `evaluate`, `ebft`, `trainer` (device, precision, attention) and `model`.
        progress: called with (rows done, rows in all), counting both models.

    Raises:
        UserError: no usable held-out row, or a tuned model with another vocabulary.
    """
    rows = select_rows(heldout, config)
    tokenizer = load_tokenizer(base_path, config)
    device = select_device(config.trainer)
    dtype = select_precision(config.trainer, device)
    done = 0

    def on_rows(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, 2 * len(rows))

    def load(path: Path) -> nn.Module:
        return load_causal_lm(path, dtype, trust_remote_code=config.model.trust_remote_code).to(device)

    def measure(policy: nn.Module) -> Measurements:
        return evaluate_rows(
            policy,
            base,
            rows,
            config,
            n_samples=config.evaluate.n_samples,
            seed=config.evaluate.seed,
            pad_token_id=tokenizer.pad_token_id,
            batch_rows=config.evaluate.batch_rows,
            attention=select_attention(config.trainer, device),
            progress=on_rows,
        )

    base = load(base_path)
    of_base = measure(base)
    tuned = load(tuned_path)
    _check_vocabulary(base, tuned, tuned_path)
    of_tuned = measure(tuned)
    return Comparison(
        evaluation=summarise(of_base, of_tuned, config.evaluate, base_path, tuned_path),
        examples=_examples(rows, of_base, of_tuned, config.evaluate.sample_rollouts, tokenizer),
    )


def select_rows(heldout: Sequence[Row], config: RunConfig) -> list[Row]:
    """The rows to evaluate: at most `evaluate.max_rows`, spread at random over the held-out set.

    Rows stand in the order of the sources, so the first ones would be a few documents only. A row's
    `row_id` is its number in the held-out set. Rows without room for an anchor are passed over.

    Raises:
        UserError: no row has room for an anchor.
    """
    order = np.random.default_rng(config.evaluate.seed).permutation(len(heldout))
    chosen: list[Row] = []
    for number in order:
        row = {**heldout[int(number)], "row_id": int(number)}
        if row_anchors(row, config).numel():
            chosen.append(row)
        if len(chosen) == config.evaluate.max_rows:
            break
    if not chosen:
        raise UserError(
            "no held-out row has room for an anchor",
            where="data.heldout_fraction",
            value=f"{len(heldout)} held-out rows",
            expected="documents longer than ebft.context_length + ebft.generate_max_len",
            hint="hold out more documents, or lower ebft.context_length",
        )
    return sorted(chosen, key=lambda row: int(row["row_id"]))


def summarise(
    base: Measurements, tuned: Measurements, config: EvaluateConfig, base_path: Path, tuned_path: Path
) -> Evaluation:
    """Paired estimates of every metric."""
    documents = sorted(set(documents_of(base)) | set(documents_of(tuned)))
    metrics = {}
    for name, metric in METRICS.items():
        of_base = document_sums(base, metric, documents)
        of_tuned = document_sums(tuned, metric, documents)
        metrics[name] = paired_bootstrap(
            of_base.sum_D,
            of_base.weight_D,
            of_tuned.sum_D,
            of_tuned.weight_D,
            resamples=config.bootstrap_samples,
            confidence=config.confidence,
            seed=config.seed,
            transform=metric.transform,
        )
    return Evaluation(
        base_path=str(base_path),
        tuned_path=str(tuned_path),
        rows=len({record.row_id for record in base.blocks}),
        documents=len(documents),
        tokens=sum(record.tokens for record in base.likelihoods),
        blocks=len(base.blocks),
        dropped_base=base.dropped_blocks,
        dropped_tuned=tuned.dropped_blocks,
        n_samples=config.n_samples,
        seed=config.seed,
        confidence=config.confidence,
        bootstrap_samples=config.bootstrap_samples,
        metrics=metrics,
    )


def training_evaluator(
    rows: Sequence[Row], config: RunConfig, *, feature_model: nn.Module | None, pad_token_id: int
) -> Callable[[nn.Module], Mapping[str, float]]:
    """A function from the policy to its metrics on `rows` (which carry `row_id`), by the names of `METRICS`.

    Args:
        feature_model: the frozen feature network; None: the policy with its adapters disabled.

    Raises (when called):
        UserError: no row has room for an anchor.
    """

    def evaluate(policy: nn.Module) -> Mapping[str, float]:
        device = next(policy.parameters()).device
        measurements = evaluate_rows(
            policy,
            policy if feature_model is None else feature_model,
            rows,
            config,
            # Keys of the `evaluate` section do not belong to the training stage.
            n_samples=max(2, config.ebft.n_samples_per_prompt),
            seed=config.trainer.seed,
            pad_token_id=pad_token_id,
            batch_rows=config.trainer.micro_batch_size,
            attention=select_attention(config.trainer, device),
        )
        return metric_means(measurements)

    return evaluate


def _check_vocabulary(base: Any, tuned: Any, tuned_path: Path) -> None:
    wanted, found = base.config.vocab_size, tuned.config.vocab_size
    if wanted != found:
        raise UserError(
            "the two models have different vocabularies, so they cannot share rows or features",
            where=str(tuned_path),
            value=f"{found} tokens",
            expected=f"{wanted} tokens",
        )


def _examples(
    rows: Sequence[Row], base: Measurements, tuned: Measurements, count: int, tokenizer: Any
) -> list[RolloutExample]:
    """`count` anchors, evenly spread over everything that was measured."""
    by_id = {int(row["row_id"]): row for row in rows}
    total = len(base.blocks)
    numbers = sorted({int((i + 0.5) * total / count) for i in range(count)}) if count else []
    examples = []
    for number in numbers:
        old, new = base.blocks[number], tuned.blocks[number]
        row = by_id[old.row_id]
        ids = row["input_ids"]
        start = max(document_at(row, old.anchor - 1)[1], old.anchor - CONTEXT_TOKENS)
        end = old.anchor + len(old.tokens[0])
        examples.append(
            RolloutExample(
                row_id=old.row_id,
                document=old.document,
                anchor=old.anchor,
                context=tokenizer.decode(ids[start : old.anchor]),
                ground_truth=tokenizer.decode(ids[old.anchor : end]),
                base_samples=tuple(tokenizer.decode(block) for block in old.tokens),
                tuned_samples=tuple(tokenizer.decode(block) for block in new.tokens),
                base_alignments=old.alignments,
                tuned_alignments=new.alignments,
            )
        )
    return examples
