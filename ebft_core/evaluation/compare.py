"""Compare models on the same held-out rows, and evaluate a policy while it is being trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import nn

from ebft_core.bootstrap import PairedEstimate, bootstrap_statistics, paired_bootstrap
from ebft_core.config import RunConfig
from ebft_core.errors import UserError
from ebft_core.evaluation.downstream.suite import Suite
from ebft_core.evaluation.examples import make_examples
from ebft_core.evaluation.measure import evaluate_rows
from ebft_core.evaluation.metrics import document_sums, documents_of, metric_means, metrics_of
from ebft_core.evaluation.records import AnswerRecord, Measurements
from ebft_core.evaluation.sampling import Row
from ebft_core.evaluation.summary import Evaluation, Reference, RolloutExample
from ebft_core.models import (
    load_causal_lm,
    load_tokenizer,
    select_attention,
    select_device,
    select_precision,
)
from ebft_core.rows import row_anchors
from ebft_core.tokenizer import vocabulary_digest

_BASE, _TUNED = "/base", "/tuned"
"""Names beside those of `evaluate.against`, which have no slash."""


@dataclass(frozen=True)
class Comparison:
    """The numbers, some rollouts to look at, and the answers of both models to the problems of all tasks."""

    evaluation: Evaluation
    examples: Sequence[RolloutExample]
    base_answers: Sequence[AnswerRecord] = ()
    tuned_answers: Sequence[AnswerRecord] = ()


def compare_models(
    base_path: Path,
    tuned_path: Path,
    heldout: Sequence[Row],
    config: RunConfig,
    *,
    stop_token_ids: Sequence[int] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Evaluate base, tuned model and those of `evaluate.against` on the same rows.

    The feature network of all is `evaluate.feature_model`, or else the base model.

    Args:
        base_path, tuned_path: model folders with the same tokenizer.
        heldout: the tokenized held-out rows (a `datasets.Dataset` will do).
        config: sections `evaluate`, `ebft`, `trainer` (device, precision, attention) and `model`.
        stop_token_ids: tokens that end a turn of a completion (see `data/stop_tokens.py`); structured mode
            needs them.
        progress: called with (rows done, rows in all), counting every model.

    Raises:
        UserError: no usable held-out row, or a model with another vocabulary or tokenizer.
        ValueError: structured mode without `stop_token_ids`.
    """
    rows = select_rows(heldout, config)
    against = {name: Path(folder).expanduser() for name, folder in config.evaluate.against.items()}
    feature_model = config.evaluate.feature_model
    measured = measure_models(
        {_BASE: base_path, _TUNED: tuned_path, **against},
        rows,
        config,
        feature_path=base_path if feature_model is None else Path(feature_model).expanduser(),
        stop_token_ids=stop_token_ids,
        progress=progress,
    )
    base, tuned = measured[_BASE], measured[_TUNED]
    references = {
        name: Reference(str(path), paired_metrics(measured[name], tuned, config))
        for name, path in against.items()
    }
    return Comparison(
        evaluation=summarise(base, tuned, config, base_path, tuned_path, references),
        examples=make_examples(
            rows, base, tuned, config.evaluate.sample_rollouts, load_tokenizer(base_path, config)
        ),
        base_answers=base.answers,
        tuned_answers=tuned.answers,
    )


def measure_models(
    models: Mapping[str, Path],
    rows: Sequence[Row],
    config: RunConfig,
    *,
    feature_path: Path,
    stop_token_ids: Sequence[int] = (),
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Measurements]:
    """Measure models on the same rows and tasks with the same random numbers.

    Beside the feature network one model is in memory at a time.

    Args:
        models: name → model folder.
        rows: tokenized rows with `row_id`, as `select_rows` gives them.
        config: as for `compare_models`.
        feature_path: folder of the feature network.
        stop_token_ids: as for `compare_models`.
        progress: called with (rows and problems done, those in all), counting every model.

    Returns:
        The measurements by the names of `models`.

    Raises:
        UserError: a model has another vocabulary or tokenizer than the feature network, or a task cannot be
            done with it.
        SandboxError: the sandbox for generated programs did not come up.
        ValueError: structured mode without `stop_token_ids`.
    """
    _check_tokenizers(models.values(), feature_path, config)
    tokenizer = load_tokenizer(feature_path, config)
    suite = Suite(config, tokenizer, rows, stop_token_ids)
    device = select_device(config.trainer)
    dtype = select_precision(config.trainer, device)
    done = 0

    def on_done(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, len(models) * (len(rows) + suite.problems))

    def load(path: Path) -> nn.Module:
        return load_causal_lm(path, dtype, trust_remote_code=config.model.trust_remote_code).to(device)

    def measure(path: Path) -> Measurements:
        policy = feature_model if path.resolve() == feature_path.resolve() else load(path)
        _check_vocabulary(feature_model, policy, path)
        measured = evaluate_rows(
            policy,
            feature_model,
            rows,
            config,
            n_samples=config.evaluate.n_samples,
            seed=config.evaluate.seed,
            pad_token_id=tokenizer.pad_token_id,
            batch_rows=config.evaluate.batch_rows,
            stop_token_ids=stop_token_ids,
            attention=select_attention(config.trainer, device),
            progress=on_done,
        )
        measured.scores, measured.answers = suite.measure(policy, on_done)
        return measured

    feature_model = load(feature_path)
    return {name: measure(path) for name, path in models.items()}


def select_rows(heldout: Sequence[Row], config: RunConfig) -> list[Row]:
    """The rows to evaluate: at most `evaluate.max_rows`, spread at random over the held-out set.

    Rows stand in the order of the sources, so the first ones would be a few documents only. A row's
    `row_id` is its number in the held-out set. Rows without room for an anchor are passed over.

    Raises:
        UserError: no row has room for an anchor, or there is no row.
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
        raise _nothing_to_measure(len(heldout), config)
    return sorted(chosen, key=lambda row: int(row["row_id"]))


def _nothing_to_measure(found: int, config: RunConfig) -> UserError:
    if config.ebft.mode == "structured":
        return UserError(
            "no example is held out",
            where="data.heldout_fraction",
            value=config.data.heldout_fraction,
            expected="held-out documents of which at least one makes an example",
            hint="hold out more documents; the stage `tokenize` says which rows were left out",
        )
    return UserError(
        "no held-out row has room for an anchor",
        where="data.heldout_fraction",
        value=f"{found} held-out rows",
        expected="documents longer than ebft.context_length + ebft.generate_max_len",
        hint="hold out more documents, or lower ebft.context_length",
    )


def paired_metrics(base: Measurements, tuned: Measurements, config: RunConfig) -> dict[str, PairedEstimate]:
    """Paired estimates of every metric of two models measured on the same rows and tasks, by name."""
    settings = config.evaluate
    how: dict[str, Any] = {
        "resamples": settings.bootstrap_samples,
        "confidence": settings.confidence,
        "seed": settings.seed,
    }
    documents = sorted(set(documents_of(base)) | set(documents_of(tuned)))
    metrics = {}
    for name, metric in metrics_of(base).items():
        of_base = document_sums(base, metric, documents)
        of_tuned = document_sums(tuned, metric, documents)
        metrics[name] = paired_bootstrap(
            of_base.sum_D,
            of_base.weight_D,
            of_tuned.sum_D,
            of_tuned.weight_D,
            transform=metric.transform,
            **how,
        )
    for name, scores in base.scores.items():
        of_tuned_SP = tuned.scores[name].statistics_SP
        metrics[name] = bootstrap_statistics(scores.statistics_SP, of_tuned_SP, scores.score, **how)
    return metrics


def summarise(
    base: Measurements,
    tuned: Measurements,
    config: RunConfig,
    base_path: Path,
    tuned_path: Path,
    against: Mapping[str, Reference] = MappingProxyType({}),
) -> Evaluation:
    """The result of a comparison: paired estimates of every metric, and how much was measured."""
    settings = config.evaluate
    return Evaluation(
        base_path=str(base_path),
        tuned_path=str(tuned_path),
        rows=len({record.row_id for record in base.blocks}),
        documents=len(set(documents_of(base)) | set(documents_of(tuned))),
        tokens=sum(record.tokens for record in base.likelihoods),
        blocks=len(base.blocks),
        dropped_base=base.dropped_blocks,
        dropped_tuned=tuned.dropped_blocks,
        n_samples=settings.n_samples,
        seed=settings.seed,
        confidence=settings.confidence,
        bootstrap_samples=settings.bootstrap_samples,
        metrics=paired_metrics(base, tuned, config),
        mode=config.ebft.mode,
        against=against,
    )


def training_evaluator(
    rows: Sequence[Row],
    config: RunConfig,
    *,
    feature_model: nn.Module | None,
    pad_token_id: int,
    stop_token_ids: Sequence[int] = (),
) -> Callable[[nn.Module], Mapping[str, float]]:
    """A function from the policy to its metrics on `rows` (which carry `row_id`), by the names of `METRICS`.

    Args:
        feature_model: the frozen feature network; None: the policy with its adapters disabled.
        stop_token_ids: tokens that end a turn of a completion; structured mode needs them.

    Raises (when called):
        UserError: the architecture is not supported. FloatingPointError: the policy has diverged.
        ValueError: structured mode without `stop_token_ids`.
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
            stop_token_ids=stop_token_ids,
            attention=select_attention(config.trainer, device),
        )
        return metric_means(measurements)

    return evaluate


def _check_tokenizers(paths: Iterable[Path], feature_path: Path, config: RunConfig) -> None:
    wanted = vocabulary_digest(load_tokenizer(feature_path, config))
    for path in paths:
        if vocabulary_digest(load_tokenizer(path, config)) != wanted:
            raise UserError(
                "the two models have different tokenizers, so they cannot share rows or features",
                where=str(path),
                expected=f"the tokens of {feature_path}",
            )


def _check_vocabulary(base: Any, tuned: Any, tuned_path: Path) -> None:
    wanted, found = base.config.vocab_size, tuned.config.vocab_size
    if wanted != found:
        raise UserError(
            "the two models have different vocabularies, so they cannot share rows or features",
            where=str(tuned_path),
            value=f"{found} tokens",
            expected=f"{wanted} tokens",
        )
