"""`ebft merge`, `ebft evaluate` and `ebft preview` on real folders, through the command line's own entry."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from ebft_core.cli import app
from ebft_core.config import FromScratchConfig
from ebft_core.scratch.tokenizer import make_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny random base and an adapter whose every weight is random."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    )
    model.save_pretrained(root / "base")
    tuned = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    tuned.save_pretrained(root / "adapter")
    return root / "base", root / "adapter"


def merge(base: Path, adapter: Path, output: Path, *more: str) -> tuple[int, str]:
    options = ["--base", str(base), "--adapter", str(adapter), "--output", str(output)]
    result = CliRunner().invoke(app, ["merge", *options, *more])
    return result.exit_code, result.output


def test_merge_writes_a_model_and_says_that_it_was_checked(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    code, output = merge(*folders, tmp_path / "merged")
    assert code == 0, output
    assert "checked on 4 prompts" in output
    base = AutoModelForCausalLM.from_pretrained(folders[0]).state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {name for name in base if "_proj" in name}


def test_merge_may_skip_the_check(folders: tuple[Path, Path], tmp_path: Path) -> None:
    code, output = merge(*folders, tmp_path / "merged", "--no-check")
    assert code == 0
    assert "checked" not in output


@pytest.mark.parametrize("case", ["no base", "no adapter", "output exists"])
def test_bad_folders_exit_78(folders: tuple[Path, Path], tmp_path: Path, case: str) -> None:
    base, adapter = folders
    output = tmp_path / "merged"
    if case == "output exists":
        output.mkdir()
    code, text = merge(
        tmp_path / "x" if case == "no base" else base,
        tmp_path / "x" if case == "no adapter" else adapter,
        output,
    )
    assert code == 78
    assert "error: " in text
    assert not output.exists() or not any(output.iterdir())


def test_an_adapter_of_another_base_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = folders
    stranger = tmp_path / "adapter"
    stranger.mkdir()
    for file in adapter.iterdir():
        (stranger / file.name).write_bytes(file.read_bytes())
    (stranger / "ebft.json").write_text(json.dumps({"base_digest": "0" * 64}))
    code, text = merge(base, stranger, tmp_path / "merged")
    assert code == 78
    assert "error: " in text


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two byte-level models: random weights, and the same with noise on the output layer."""
    root = tmp_path_factory.mktemp("evaluated")
    tokenizer = make_tokenizer(FromScratchConfig(sources=["unused"]), [])
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    )
    for folder in (root / "base", root / "tuned"):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        with torch.no_grad():
            model.lm_head.weight.add_(torch.randn_like(model.lm_head.weight))
    return root / "base", root / "tuned"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(f"document {number}: " + "some text to read. " * 8)
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {{name_or_path: not-used}}\ndata: {{sources: [{{path: '{tmp_path}/*.txt'}}],"
        " sequence_length: 64, heldout_fraction: 0.4}\n"
        "evaluate: {max_rows: 6, n_samples: 2, bootstrap_samples: 50}\n"
        "ebft: {temperature: 1.0}\ntrainer: {precision: float32, device: cpu}\n"
    )
    return file


def evaluate(model: Path, baseline: Path, config: Path, output: Path) -> tuple[int, str]:
    options = ["--model", str(model), "--baseline", str(baseline), "--config", str(config)]
    result = CliRunner().invoke(app, ["evaluate", *options, "--output", str(output)])
    return result.exit_code, result.output


def test_evaluate_measures_both_models(models: tuple[Path, Path], run_file: Path, tmp_path: Path) -> None:
    base, tuned = models
    code, output = evaluate(tuned, base, run_file, tmp_path / "evaluation.json")
    assert code == 0, output
    assert "Held-out evaluation" in output
    report = json.loads((tmp_path / "evaluation.json").read_text())
    cross_entropy = report["metrics"]["ce"]
    # Random weights predict nothing; noise on the output layer makes confident mistakes.
    assert cross_entropy["base"] == pytest.approx(math.log(258), abs=0.2)
    assert cross_entropy["tuned"] > cross_entropy["base"] + 0.2
    assert (report["rows"], report["base"]["path"]) == (6, str(base))


def test_a_model_compared_with_itself_differs_nowhere(
    models: tuple[Path, Path], run_file: Path, tmp_path: Path
) -> None:
    code, output = evaluate(models[1], models[1], run_file, tmp_path / "evaluation.json")
    assert code == 0, output
    metrics = json.loads((tmp_path / "evaluation.json").read_text())["metrics"]
    assert {metric["difference"] for metric in metrics.values()} == {0.0}


def test_evaluate_without_a_model_exits_78(models: tuple[Path, Path], run_file: Path, tmp_path: Path) -> None:
    code, text = evaluate(tmp_path / "none", models[0], run_file, tmp_path / "x.json")
    assert code == 78
    assert "--model" in text


def test_json_goes_to_standard_output_alone(models: tuple[Path, Path], run_file: Path) -> None:
    options = ["--model", str(models[1]), "--baseline", str(models[0]), "--config", str(run_file), "--json"]
    result = CliRunner().invoke(app, ["evaluate", *options])
    assert result.exit_code == 0, result.output
    assert set(json.loads(result.stdout)["metrics"]) >= {"ce", "perplexity", "cfm", "duplicate_rate"}


def test_preview_shows_rows_of_the_quickstart() -> None:
    quickstart = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
    result = CliRunner().invoke(app, ["preview", str(quickstart), "--rows", "2", "--set", "ebft.stride=64"])
    assert result.exit_code == 0, result.output
    assert "row 2" in result.output
    assert "row 3" not in result.output
    assert "4 anchors" in result.output  # at 8, 72, 136 and 200 in a row of 256 tokens
