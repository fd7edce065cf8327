"""Two models from disk: paired numbers, JSON, table, examples, row selection."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from ebft_core.bootstrap import PairedEstimate
from ebft_core.errors import UserError
from ebft_core.evaluation import Evaluation, compare_models, print_table
from ebft_core.evaluation.compare import select_rows
from ebft_core.evaluation.table import verdict
from evaluation.builders import make_row, run_config, save_model, tiny_model

HELDOUT = [make_row([length], 100 + length) for length in (18, 25, 21, 30, 16)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tiny_model(seed=0), tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tiny_model(seed=1), tmp_path_factory.mktemp("models") / "tuned")


def test_identical_models_differ_by_exactly_nothing(base: Path) -> None:
    comparison = compare_models(base, base, HELDOUT, run_config())
    result = comparison.evaluation
    assert len(result.metrics) == 9
    for name, estimate in result.metrics.items():
        assert estimate.difference == 0.0, name
        assert estimate.standard_error == 0.0
        assert estimate.interval[0] <= 0.0 <= estimate.interval[1]
        assert math.isfinite(estimate.base)
    for example in comparison.examples:
        assert example.base_samples == example.tuned_samples


def test_different_models_and_the_way_back(base: Path, tuned: Path) -> None:
    there = compare_models(base, tuned, HELDOUT, run_config())
    result = there.evaluation
    assert (result.rows, result.documents, result.blocks) == (5, 5, 3 + 4 + 3 + 5 + 2)
    assert result.tokens == sum(len(row["input_ids"]) - 1 for row in HELDOUT)
    for estimate in result.metrics.values():
        assert estimate.difference == pytest.approx(estimate.tuned - estimate.base)
    assert result.metrics["ce"].difference != 0
    # CE does not depend on the feature network, so swapping the models swaps its sign and nothing else.
    back = compare_models(tuned, base, HELDOUT, run_config()).evaluation.metrics["ce"]
    assert back.difference == pytest.approx(-result.metrics["ce"].difference)
    assert back.standard_error == pytest.approx(result.metrics["ce"].standard_error)


def test_json_round_trip(base: Path, tuned: Path) -> None:
    result = compare_models(base, tuned, HELDOUT, run_config()).evaluation
    text = json.dumps(result.to_json(), allow_nan=False)
    assert Evaluation.from_json(json.loads(text)) == result
    assert json.loads(text)["metrics"]["cfm"]["better"] == "lower"
    with pytest.raises(ValueError, match="not an evaluation"):
        Evaluation.from_json({"schema": "other"})


def test_examples_decode_context_truth_and_samples(base: Path, tuned: Path) -> None:
    rows = {i: row for i, row in enumerate(HELDOUT)}
    examples = compare_models(base, tuned, HELDOUT, run_config()).examples
    assert len(examples) == 3
    for example in examples:
        ids = rows[example.row_id]["input_ids"]
        assert example.context.split() == [f"<{i}>" for i in ids[: example.anchor]]
        assert example.ground_truth.split() == [f"<{i}>" for i in ids[example.anchor : example.anchor + 3]]
        assert len(example.base_samples) == len(example.tuned_samples) == 3
        assert all(len(sample.split()) == 3 for sample in example.tuned_samples)
        json.dumps(example.to_json())


def test_progress_counts_both_models(base: Path, tuned: Path) -> None:
    seen: list[tuple[int, int]] = []
    compare_models(
        base, tuned, HELDOUT, run_config(), progress=lambda done, total: seen.append((done, total))
    )
    assert [done for done, _ in seen] == [2, 4, 5, 7, 9, 10]
    assert {total for _, total in seen} == {10}


def test_other_vocabulary_is_refused(base: Path, tmp_path: Path) -> None:
    model = tiny_model(seed=1)
    other = save_model(model, tmp_path / "other")
    model.resize_token_embeddings(40)
    model.save_pretrained(other)
    with pytest.raises(UserError, match="different vocabularies"):
        compare_models(base, other, HELDOUT, run_config())


def test_other_tokens_under_the_same_ids_are_refused(base: Path, tmp_path: Path) -> None:
    other = save_model(tiny_model(seed=1), tmp_path / "other")
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace('"<7>": 7', '"seven": 7'))
    with pytest.raises(UserError, match="different tokenizers"):
        compare_models(base, other, HELDOUT, run_config())


def test_rows_are_spread_over_the_heldout_set_and_long_enough() -> None:
    rows = [make_row([5 if i % 2 else 20], 0) for i in range(60)]
    chosen = [row["row_id"] for row in select_rows(rows, run_config())]
    assert len(chosen) == 8
    assert chosen == sorted(chosen)
    assert all(number % 2 == 0 for number in chosen)
    assert max(chosen) > 30
    assert [row["row_id"] for row in select_rows(rows, run_config())] == chosen


def test_no_usable_heldout_row() -> None:
    with pytest.raises(UserError, match="no held-out row has room"):
        select_rows([make_row([5], 0)], run_config())


def _estimate(difference: float, interval: tuple[float, float]) -> PairedEstimate:
    return PairedEstimate(1.0, 1.0 + difference, difference, 0.1, interval, (0, 2), (0, 2), 9)


@pytest.mark.parametrize(
    ("metric", "difference", "interval", "expected"),
    [
        ("ce", -0.5, (-0.6, -0.4), "▼ better"),
        ("ce", 0.5, (0.4, 0.6), "▲ worse"),
        ("alignment", 0.5, (0.4, 0.6), "▲ better"),
        ("alignment", -0.5, (-0.6, -0.4), "▼ worse"),
        ("entropy", -0.5, (-0.6, -0.4), "▼"),
        ("ce", -0.5, (-1.1, 0.1), "-"),
        ("ce", -0.5, (math.nan, math.nan), "-"),
    ],
)
def test_verdict_needs_an_interval_without_zero(metric, difference, interval, expected) -> None:
    assert verdict(metric, _estimate(difference, interval)).plain == expected


def test_table_shows_difference_and_error(base: Path, tuned: Path) -> None:
    result = compare_models(base, tuned, HELDOUT, run_config()).evaluation
    output = io.StringIO()
    print_table(result, Console(file=output, width=120))
    ce = result.metrics["ce"]
    line = next(line for line in output.getvalue().splitlines() if "cross-entropy" in line)
    assert f"{ce.base:.4f}" in line
    assert f"{ce.difference:+.4f} ± {ce.standard_error:.4f}" in line
    assert "5 rows, 5 documents" in output.getvalue()
