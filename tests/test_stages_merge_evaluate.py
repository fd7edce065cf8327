"""Stages `merge` and `evaluate` on folders as the stages before them leave them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from evaluation.builders import make_row, run_config, save_model, tiny_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebft_core.base_model import BaseModelInfo, digest_model_folder, write_base
from ebft_core.errors import UserError
from ebft_core.evaluation import Evaluation
from ebft_core.events import EventWriter, read_events
from ebft_core.stage_runner import Preempted, StageContext
from ebft_core.stages import evaluate_model, merge_adapter
from ebft_core.stop import StopSignal


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    """Outputs of prepare_base, tokenize and train; train left a LoRA adapter."""
    folders = {name: tmp_path / name for name in ("prepare_base", "tokenize", "train")}
    for folder in folders.values():
        folder.mkdir()
    base = save_model(tiny_model(seed=0), folders["prepare_base"] / "model")
    digest = digest_model_folder(base)
    write_base(folders["prepare_base"], BaseModelInfo(base, digest, "test"))
    rows = [make_row([length], length) for length in (18, 25, 30)]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "row_id"}
    for side in ("train", "heldout"):
        Dataset.from_dict(columns).save_to_disk(str(folders["tokenize"] / side))
    policy = get_peft_model(tiny_model(seed=0), LoraConfig(target_modules="all-linear", use_rslora=True))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    policy.save_pretrained(folders["train"] / "adapter")
    (folders["train"] / "adapter" / "ebft.json").write_text(json.dumps({"base_digest": digest}))
    return folders


def _context(tmp_path: Path, inputs: dict[str, Path], stage: str) -> StageContext:
    output = tmp_path / f"{stage}.staging"
    output.mkdir()
    events = EventWriter(tmp_path / f"{stage}.jsonl", stage)
    return StageContext(run_config(), tmp_path, inputs, output, tmp_path / "work", events, StopSignal())


def _logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(torch.arange(3, 13)[None]).logits


def test_merge_then_evaluate(tmp_path: Path, inputs: dict[str, Path]) -> None:
    merge = _context(tmp_path, inputs, "merge")
    result = merge_adapter.run(merge)
    assert json.loads((merge.output / "merge.json").read_text()) == result
    assert result["digest_checked"]
    assert result["check"]["error"] < 1e-5 < result["check"]["effect"]
    assert sorted(path.name for path in merge.output.iterdir()) == ["merge.json", "model"]
    assert AutoTokenizer.from_pretrained(merge.output / "model").pad_token_id == 2
    progress = [event for event in read_events(tmp_path / "merge.jsonl") if event["kind"] == "progress"]
    assert progress[-1]["done"] == progress[-1]["total"] > 0

    evaluate = _context(tmp_path, {**inputs, "merge": merge.output}, "evaluate")
    meta = evaluate_model.run(evaluate)
    result = Evaluation.from_json(json.loads((evaluate.output / "evaluation.json").read_text()))
    assert result.rows == 3
    assert result.metrics["ce"].difference != 0
    assert meta["ce"]["difference"] == result.metrics["ce"].difference
    rollouts = json.loads((evaluate.output / "rollouts.json").read_text())["rollouts"]
    assert len(rollouts) == 3
    assert any(example["base_samples"] != example["tuned_samples"] for example in rollouts)


def test_full_fine_tuning_adopts_the_trained_model(tmp_path: Path, inputs: dict[str, Path]) -> None:
    (inputs["train"] / "adapter").rename(tmp_path / "unused")
    trained = save_model(tiny_model(seed=1), inputs["train"] / "model")
    context = _context(tmp_path, inputs, "merge")
    assert merge_adapter.run(context)["kind"] == "full"
    assert torch.equal(_logits(context.output / "model"), _logits(trained))
    linked = (context.output / "model" / "model.safetensors").stat()
    assert linked.st_ino == (trained / "model.safetensors").stat().st_ino


def test_base_that_changed_after_it_was_prepared_is_refused(tmp_path: Path, inputs: dict[str, Path]) -> None:
    save_model(tiny_model(seed=9), inputs["prepare_base"] / "model")
    with pytest.raises(UserError, match="base model has changed"):
        merge_adapter.run(_context(tmp_path, inputs, "merge"))


@pytest.mark.parametrize("stage", [merge_adapter, evaluate_model])
def test_a_stop_request_ends_the_stage(tmp_path: Path, inputs: dict[str, Path], stage) -> None:
    context = _context(tmp_path, {**inputs, "merge": inputs["prepare_base"]}, "stage")
    context.stop.request("test")
    with pytest.raises(Preempted, match="stopped while"):
        stage.run(context)
    assert list(context.output.iterdir()) == []
