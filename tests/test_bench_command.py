"""`ebft bench` on a tiny model: figures that hang together, a table, and errors of the usual shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ebft_core.cli import app


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("some text " * 200)
    scratch = {"sources": [str(tmp_path / "*.txt")], "hidden_size": 16, "intermediate_size": 24}
    scratch |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = {
        "model": {"from_scratch": scratch},
        "data": {"sources": [{"path": str(tmp_path / "text.txt")}], "sequence_length": 32},
        "trainer": {"batch_size": 2, "device": "cpu"},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_json_figures_hang_together(run_file: Path) -> None:
    result = CliRunner().invoke(app, ["bench", str(run_file), "--rounds", "1", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [row["micro_batch_size"] for row in report["rows"]] == [1, 2]
    for row in report["rows"]:
        seconds = row["seconds"]
        assert seconds["step"] == pytest.approx(seconds["rollout"] + seconds["features"] + seconds["update"])
        generated = row["micro_batch_size"] * 3 * 4 * 8  # anchors 8, 16, 24; 4 samples of 8 tokens
        assert row["tokens_per_second"]["rollout"] == pytest.approx(generated / seconds["rollout"])
        assert all(0 < share < 1 for share in row["fraction_of_peak"].values())
    assert report["best"] in report["rows"]


def test_the_table_ends_with_a_suggestion(run_file: Path) -> None:
    result = CliRunner().invoke(app, ["bench", str(run_file), "--rounds", "1"])
    assert result.exit_code == 0, result.output
    assert "suggestion: trainer.micro_batch_size:" in result.stdout


def test_a_missing_model_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {name_or_path: ./nowhere}\ndata: {sources: [{path: x.txt}]}\n")
    result = CliRunner().invoke(app, ["bench", str(path)])
    assert result.exit_code == 78
    assert "no such folder" in result.output
