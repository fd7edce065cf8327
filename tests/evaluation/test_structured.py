"""The evaluation of whole completions: against the slow one, its invariances, and what people see of it."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path

import pytest
import torch
from data.builders import byte_tokenizer, write_jsonl
from data.builders import tiny_model as tiny_data_model
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from rich.console import Console
from typer.testing import CliRunner

from ebft_core.base_model import BaseModelInfo, digest_model_folder, write_base
from ebft_core.cli import app
from ebft_core.config import RunConfig
from ebft_core.errors import UserError
from ebft_core.evaluation import (
    METRICS,
    Evaluation,
    Measurements,
    RolloutExample,
    compare_models,
    evaluate_rows,
    print_table,
    training_evaluator,
)
from ebft_core.evaluation.compare import select_rows
from ebft_core.evaluation.metrics import metric_means
from ebft_core.events import EventWriter
from ebft_core.rows import mix_seed
from ebft_core.stage_runner import StageContext
from ebft_core.stages import evaluate_model
from ebft_core.stop import StopSignal
from evaluation.builders import STOPS, make_example, save_model, structured_config, tiny_model
from evaluation.slow import slow_completions, slow_cross_entropy

ROWS = [
    make_example(4, [7], 1),
    make_example(9, [3], 2),
    make_example(6, [3, 4], 3),
    make_example(3, [2, 2, 5], 4, given=2),
    make_example(5, [12], 5),
    make_example(7, [4, 3], 6),
]


def _measure(policy, base, rows, config: RunConfig, **options) -> Measurements:
    options = {"n_samples": 3, "seed": 5, "pad_token_id": 2, "batch_rows": 4, **options}
    return evaluate_rows(policy, base, rows, config, stop_token_ids=STOPS, **options)


def _uniforms(row_id: int, length: int, n_samples: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(mix_seed(5, row_id))
    return torch.rand(length, n_samples, generator=generator).T.double()


@pytest.mark.parametrize("embed_method", ["last_token", "mean_pooling", "completion_mean"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_equals_the_slow_evaluation(architecture: str, embed_method: str) -> None:
    base, policy = tiny_model(architecture, 0), tiny_model(architecture, 1)
    config = structured_config(embed_method=embed_method)
    measured = _measure(policy, base, ROWS, config)
    slow_base, slow_policy = copy.deepcopy(base).double(), copy.deepcopy(policy).double()
    with torch.no_grad():
        expected = slow_cross_entropy(slow_policy, ROWS)
        assert [r.tokens for r in measured.likelihoods] == [sum(row["is_target"]) for row in ROWS]
        for record in measured.likelihoods:
            assert record.nll_sum == pytest.approx(expected[record.document][0], rel=1e-5)
        for row, block in zip(ROWS, measured.blocks, strict=True):
            uniforms_NG = _uniforms(row["row_id"], config.ebft.max_completion_length, 3)
            slow = slow_completions(slow_policy, slow_base, row, uniforms_NG, set(STOPS), config)
            assert (block.row_id, block.anchor) == (row["row_id"], row["prompt_lengths"][0])
            assert block.tokens == slow.pop("tokens")
            assert block.written == slow.pop("written")
            assert set(slow) == set(METRICS) - {"ce", "perplexity"}
            for name, value in slow.items():
                assert METRICS[name].block_value(block) == pytest.approx(value, abs=2e-5), name
    # The rows exercise what is special about completions.
    samples = [sample for block in measured.blocks for sample in block.tokens]
    assert len({len(sample) for sample in samples}) > 3
    assert {cut for block in measured.blocks for cut in block.truncated} == {False, True}
    assert any(not all(mask) for block in measured.blocks for mask in block.written)


def test_the_entropy_is_a_mean_over_written_tokens() -> None:
    """Long completions count more: the mean over all tokens, not the mean of the prompts' means."""
    measured = _measure(tiny_model(seed=1), tiny_model(seed=0), ROWS, structured_config())
    weights = [sum(sum(mask) for mask in block.written) for block in measured.blocks]
    total = sum(w * block.entropy for w, block in zip(weights, measured.blocks, strict=True))
    means = metric_means(measured)
    assert means["entropy"] == pytest.approx(total / sum(weights))
    assert abs(means["entropy"] - sum(b.entropy for b in measured.blocks) / len(ROWS)) > 1e-4
    assert means["completion_tokens"] == pytest.approx(sum(weights) / (3 * len(ROWS)))
    assert list(means) == list(METRICS)


def test_equal_completions_are_duplicates() -> None:
    measured = _measure(tiny_model(seed=1), tiny_model(seed=0), ROWS, structured_config(temperature=1e-5))
    for block in measured.blocks:
        assert len(set(block.tokens)) == 1
        assert block.duplicate_rate == pytest.approx(2 / 3)
        assert block.diversity == pytest.approx(1.0, abs=1e-6)


def test_batching_and_order_change_nothing() -> None:
    base, policy, config = tiny_model(seed=0), tiny_model(seed=1), structured_config()
    whole = _measure(policy, base, ROWS, config, batch_rows=6)
    single = _measure(policy, base, ROWS[::-1], config, batch_rows=1)
    for block, other in zip(whole.blocks, single.blocks[::-1], strict=True):
        assert (block.row_id, block.tokens, block.truncated) == (other.row_id, other.tokens, other.truncated)
        assert block.cfm == pytest.approx(other.cfm, abs=1e-5)
        assert block.entropy == pytest.approx(other.entropy, abs=1e-5)


def test_the_number_of_samples_is_the_evaluation_s_own() -> None:
    config = structured_config(n_samples_per_prompt=2)
    measured = _measure(tiny_model(seed=1), tiny_model(seed=0), ROWS, config, n_samples=5)
    assert {len(block.tokens) for block in measured.blocks} == {5}
    evaluate = training_evaluator(
        ROWS, config, feature_model=tiny_model(seed=0), pad_token_id=2, stop_token_ids=STOPS
    )
    inside = evaluate(tiny_model(seed=1))
    assert list(inside) == list(METRICS)
    assert inside["duplicate_rate"] in [n / 12 for n in range(7)]


def test_a_policy_with_adapters_is_measured_with_them_and_its_features_without() -> None:
    """The evaluation during training: the same as with a network of the features' own."""
    policy = get_peft_model(
        tiny_model(seed=0), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter))
    policy.train()
    options = {"pad_token_id": 2, "stop_token_ids": STOPS}
    config, base = structured_config(), tiny_model(seed=0)
    inside = training_evaluator(ROWS, config, feature_model=None, **options)(policy)
    outside = training_evaluator(ROWS, config, feature_model=base, **options)(policy)
    untuned = training_evaluator(ROWS, config, feature_model=base, **options)(base)
    assert inside == pytest.approx(outside, abs=1e-6)
    assert abs(inside["ce"] - untuned["ce"]) > 1e-3
    assert inside["completion_tokens"] != untuned["completion_tokens"]
    assert policy.training


def test_without_a_stop_token_nothing_is_written() -> None:
    with pytest.raises(ValueError, match="end a turn"):
        evaluate_rows(
            tiny_model(),
            tiny_model(),
            ROWS,
            structured_config(),
            n_samples=2,
            seed=0,
            pad_token_id=2,
            batch_rows=2,
        )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tiny_model(seed=0), tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tiny_model(seed=1), tmp_path_factory.mktemp("models") / "tuned")


def test_identical_models_differ_by_exactly_nothing(base: Path) -> None:
    comparison = compare_models(base, base, ROWS, structured_config(), stop_token_ids=STOPS)
    assert list(comparison.evaluation.metrics) == list(METRICS)
    for name, estimate in comparison.evaluation.metrics.items():
        assert (estimate.difference, estimate.standard_error) == (0.0, 0.0), name
    for example in comparison.examples:
        assert example.base_samples == example.tuned_samples
        assert example.base_notes == example.tuned_notes


def test_table_and_json_tell_the_mode(base: Path, tuned: Path) -> None:
    result = compare_models(base, tuned, ROWS, structured_config(), stop_token_ids=STOPS).evaluation
    text = json.dumps(result.to_json(), allow_nan=False)
    assert Evaluation.from_json(json.loads(text)) == result
    assert result.metrics["ce"].difference != 0
    output = io.StringIO()
    print_table(result, Console(file=output, width=140))
    table = output.getvalue()
    assert "6 prompts with 3 completions each" in table
    for name in ("completion_tokens", "truncated_rate"):
        line = next(line for line in table.splitlines() if METRICS[name].label in line)
        assert f"{result.metrics[name].tuned:.4f}" in line
        assert "better" not in line
        assert "worse" not in line


def test_examples_show_whole_prompts_and_mark_given_turns(base: Path, tuned: Path) -> None:
    config = structured_config()
    config = config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"sample_rollouts": 6})})
    examples = compare_models(base, tuned, ROWS, config, stop_token_ids=STOPS).examples
    assert len(examples) == len(ROWS)
    marked = 0
    for example, row in zip(examples, ROWS, strict=True):
        ids, prompt = row["input_ids"], row["prompt_lengths"][0]
        given = [i for i, on in zip(ids[prompt:], row["is_target"][prompt:], strict=True) if not on]
        assert example.context.split() == [f"<{i}>" for i in ids[:prompt]]
        assert example.ground_truth.split() == [f"<{i}>" for i in ids[prompt:]]
        found = [example.ground_truth[a:b] for a, b in example.ground_truth_given]
        assert " ".join(found).split() == [f"<{i}>" for i in given]
        for text, note in zip(example.base_samples, example.base_notes, strict=True):
            inserted = " ".join(text[a:b] for a, b in note.given).split()
            # Turns come in their order, and only those that had room.
            assert inserted == [f"<{i}>" for i in given][: len(inserted)]
            assert note.tokens + len(inserted) == len(text.split())
            marked += len(inserted)
            if not note.truncated:
                assert inserted == [f"<{i}>" for i in given]
                assert text.split()[-1] in {f"<{stop}>" for stop in STOPS}
        assert RolloutExample.from_json(json.loads(json.dumps(example.to_json()))) == example
    assert marked


def test_the_stage_reads_the_stop_tokens_of_the_data(tmp_path: Path, base: Path, tuned: Path) -> None:
    folders = {name: tmp_path / name for name in ("prepare_base", "tokenize", "merge", "output")}
    for folder in folders.values():
        folder.mkdir()
    write_base(folders["prepare_base"], BaseModelInfo(base, digest_model_folder(base), "test"))
    (folders["merge"] / "model").symlink_to(tuned)
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0] if name != "row_id"}
    Dataset.from_dict(columns).save_to_disk(str(folders["tokenize"] / "heldout"))
    events = EventWriter(tmp_path / "events.jsonl", "evaluate")
    output = folders.pop("output")
    context = StageContext(
        structured_config(), tmp_path, folders, output, tmp_path / "work", events, StopSignal()
    )
    with pytest.raises(UserError, match="names no token that ends a completion"):
        evaluate_model.run(context)
    (folders["tokenize"] / "data.json").write_text(json.dumps({"stop_token_ids": STOPS}), encoding="utf-8")
    meta = evaluate_model.run(context)
    expected = compare_models(base, tuned, ROWS, structured_config(), stop_token_ids=STOPS)
    assert set(meta) == set(METRICS)
    result = Evaluation.from_json(json.loads((output / "evaluation.json").read_text()))
    assert result.mode == "structured"
    assert result.metrics["ce"] == expected.evaluation.metrics["ce"]
    rollouts = json.loads((output / "rollouts.json").read_text())["rollouts"]
    assert rollouts[0]["tuned_notes"][0]["tokens"] > 0


def test_the_command_compares_two_folders(tmp_path: Path) -> None:
    """Outside of a run: the data is tokenized anew, and tells where completions end."""
    torch.manual_seed(0)
    tiny_data_model(tmp_path / "base", byte_tokenizer())
    tiny_data_model(tmp_path / "tuned", byte_tokenizer())
    records = [{"prompt": f"What is {i} + {i}? ", "completion": f"It is {2 * i}."} for i in range(20)]
    write_jsonl(tmp_path / "rows.jsonl", records)
    (tmp_path / "run.yaml").write_text(
        f"model: {{name_or_path: unused}}\ndata: {{sources: [{{path: '{tmp_path}/rows.jsonl'}}],"
        " transform: prompt_completion, sequence_length: 64, heldout_fraction: 0.4}\n"
        "ebft: {mode: structured, max_completion_length: 12}\nrollout: {use_vllm: false}\n"
        "evaluate: {max_rows: 4, n_samples: 2, bootstrap_samples: 50}\n"
        "trainer: {precision: float32, device: cpu}\n",
        encoding="utf-8",
    )
    options = [
        "--model",
        tmp_path / "tuned",
        "--baseline",
        tmp_path / "base",
        "--config",
        tmp_path / "run.yaml",
    ]
    result = CliRunner().invoke(app, ["evaluate", *map(str, options), "--output", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    assert "4 prompts with 2 completions each" in " ".join(result.output.split())
    metrics = json.loads((tmp_path / "out.json").read_text())["metrics"]
    assert 1 <= metrics["completion_tokens"]["tuned"] <= 12
    assert metrics["ce"]["difference"] != 0


def test_nothing_held_out_is_said_in_the_words_of_the_mode() -> None:
    with pytest.raises(UserError, match="no example is held out"):
        select_rows([], structured_config())


def test_examples_of_earlier_versions_are_read() -> None:
    old = {
        "row_id": 0, "document": "x", "anchor": 8, "context": "a", "ground_truth": "b", "base_samples": ["c"],
        "tuned_samples": ["d"], "base_alignments": [0.1], "tuned_alignments": [0.2],
    }  # fmt: skip
    example = RolloutExample.from_json(old)
    assert (example.base_notes, example.ground_truth_given) == ((), ())
