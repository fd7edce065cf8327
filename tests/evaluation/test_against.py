"""Further models beside base and tuned: the same numbers as in a comparison of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ebft_core.config import RunConfig
from ebft_core.errors import UserError
from ebft_core.evaluation import Evaluation, compare_models, measure_models, paired_metrics, select_rows
from ebft_core.evaluation.outside import digest_outside
from evaluation.builders import make_row, run_config, save_model, tiny_model

HELDOUT = [make_row([length], 100 + length) for length in (18, 25, 21, 30, 16)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_model(tiny_model(seed=i), root / name) for i, name in enumerate("abc")}


def _with(**evaluate: object) -> RunConfig:
    config = run_config()
    return config.model_copy(update={"evaluate": config.evaluate.model_copy(update=evaluate)})


def test_a_further_model_is_compared_as_if_it_were_the_base(models: dict[str, Path]) -> None:
    there = _with(against={"c": str(models["c"])})
    result = compare_models(models["a"], models["b"], HELDOUT, there).evaluation
    alone = compare_models(models["a"], models["b"], HELDOUT, run_config()).evaluation
    assert result.metrics == alone.metrics
    assert list(result.against) == ["c"]
    # c in the place of base, with the features of a: this run's measure, whoever stands on the other side.
    swapped = compare_models(models["c"], models["b"], HELDOUT, _with(feature_model=str(models["a"])))
    assert result.against["c"].metrics == swapped.evaluation.metrics
    assert result.against["c"].metrics["cfm"].tuned == result.metrics["cfm"].tuned
    assert result.against["c"].metrics["cfm"].base != result.metrics["cfm"].base


def test_the_feature_network_is_the_one_that_is_named(models: dict[str, Path]) -> None:
    own = compare_models(models["a"], models["b"], HELDOUT, run_config()).evaluation.metrics
    other = compare_models(models["a"], models["b"], HELDOUT, _with(feature_model=str(models["c"])))
    assert other.evaluation.metrics["ce"] == own["ce"]
    assert other.evaluation.metrics["cfm"].tuned != own["cfm"].tuned


def test_json_with_further_models(models: dict[str, Path]) -> None:
    config = _with(against={"c": str(models["c"])})
    result = compare_models(models["a"], models["b"], HELDOUT, config).evaluation
    document = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert Evaluation.from_json(document) == result
    assert document["against"]["c"]["path"] == str(models["c"])
    del document["against"]  # a file of an earlier version
    assert Evaluation.from_json(document).against == {}


def test_many_models_in_one_pass(models: dict[str, Path]) -> None:
    config, seen = run_config(), []
    rows = select_rows(HELDOUT, config)
    measured = measure_models(
        models, rows, config, feature_path=models["a"], progress=lambda *counts: seen.append(counts)
    )
    assert list(measured) == ["a", "b", "c"]
    assert seen[-1] == (15, 15)
    expected = compare_models(models["a"], models["b"], HELDOUT, config).evaluation.metrics
    assert paired_metrics(measured["a"], measured["b"], config) == expected


def test_folders_outside_the_run_are_known_by_their_content(models: dict[str, Path], tmp_path: Path) -> None:
    def digests(folder: Path) -> dict[str, str]:
        return digest_outside(_with(against={"c": str(folder)}))

    copy = save_model(tiny_model(seed=2), tmp_path / "copy")
    assert digests(models["c"]) == digests(copy) != digests(models["b"])
    assert digest_outside(run_config()) == {}


def test_unusable_folders_are_refused_before_anything_runs(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder") as error:
        digest_outside(_with(against={"old": str(tmp_path / "gone")}))
    assert error.value.where == "evaluate.against.old"
    with pytest.raises(UserError, match="held-out rows"):
        digest_outside(_with(heldout=str(tmp_path)))
    model = tiny_model(seed=1)
    model.resize_token_embeddings(40)
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="another vocabulary"):
        digest_outside(_with(against={"a": str(models["a"])}, feature_model=str(tmp_path / "other")))
