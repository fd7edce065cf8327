"""The warm start: TRL's loss on packed rows, exact resume, and the model that EBFT starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from evaluation.builders import make_row, run_config, save_model, tiny_model
from safetensors.torch import load_file

from ebft_core.base_model import BaseModelInfo, digest_model_folder, read_start, write_base
from ebft_core.config import RunConfig, parse_config
from ebft_core.errors import UserError
from ebft_core.events import EventWriter, read_events
from ebft_core.models import load_causal_lm, load_tokenizer
from ebft_core.stage_runner import Preempted, StageContext
from ebft_core.stages import warm_start
from ebft_core.stop import StopSignal
from ebft_core.trainers.warm_start import WarmStartTrainer, collate_supervised, warm_start_settings
from tests.docs_pages import page_text, table_rows

CPU = torch.device("cpu")
PACKED = [make_row([9, 6, 8], seed, prompt=2) for seed in range(8)]


def sft_config(lora: dict[str, Any] | None = None, **sft: Any) -> RunConfig:
    settings = {"max_steps": 6, "batch_size": 4, "micro_batch_size": 2, "learning_rate": 1e-2, **sft}
    document = run_config().model_dump()
    return parse_config({**document, "lora": lora, "sft": {"save_every": 2, **settings}})


def as_dataset(rows: list[dict[str, Any]]) -> Dataset:
    return Dataset.from_list([{k: v for k, v in row.items() if k != "row_id"} for row in rows])


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    """Outputs of prepare_base and tokenize."""
    folders = {name: tmp_path / name for name in ("prepare_base", "tokenize")}
    for folder in folders.values():
        folder.mkdir()
    base = save_model(tiny_model(seed=0), folders["prepare_base"] / "model")
    write_base(folders["prepare_base"], BaseModelInfo(base, digest_model_folder(base), "test"))
    as_dataset(PACKED).save_to_disk(str(folders["tokenize"] / "train"))
    return folders


def context(tmp_path: Path, inputs: dict[str, Path], config: RunConfig, **parts: Any) -> StageContext:
    output = tmp_path / "output"
    output.mkdir(parents=True, exist_ok=True)
    events = parts.pop("events", None) or EventWriter(tmp_path / "sft.jsonl", "sft")
    stop = parts.pop("stop", None) or StopSignal()
    return StageContext(config, tmp_path, inputs, output, tmp_path / "work", events, stop)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_loss_of_packed_documents_is_that_of_each_alone(tmp_path: Path, architecture: str) -> None:
    model = tiny_model(architecture)
    tokenizer = load_tokenizer(save_model(model, tmp_path / "model"), run_config())
    config = sft_config()
    trainer = WarmStartTrainer(
        model,
        tokenizer,
        config,
        warm_start_settings(config.trainer, config.sft),
        tmp_path / "checkpoints",
        as_dataset(PACKED),
        max_steps=1,
        device=CPU,
        precision=torch.float32,
        events=EventWriter(None, "sft"),
        stop=StopSignal(),
    )
    rows = [PACKED[0], make_row([12], 99, prompt=3)]  # the second one is padded
    model.eval()
    with torch.no_grad():
        loss = trainer.compute_loss(model, collate_supervised(rows, config=config, pad_token_id=2))
        total, count = 0.0, 0
        for row in rows:
            start = 0
            for length in row["document_lengths"]:
                ids, labels = (row[name][start : start + length] for name in ("input_ids", "labels"))
                start += length
                logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
                for position in range(1, length):
                    if labels[position] != -100:
                        total -= float(logprobs[position - 1, labels[position]])
                        count += 1
    assert count == (9 - 2) + (6 - 2) + (8 - 2) + (12 - 3)
    assert float(loss) == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("lora", [None, {"r": 4, "dropout": 0.1}], ids=["full", "lora"])
def test_the_stage_leaves_a_model_that_has_learned(
    tmp_path: Path, inputs: dict[str, Path], lora: dict[str, Any] | None
) -> None:
    stage = context(tmp_path, inputs, sft_config(lora, max_steps=25))
    summary = warm_start.run(stage)
    assert (summary["global_step"], summary["rows"]) == (25, len(PACKED))
    start = read_start({**inputs, "sft": stage.output})
    assert start.path == stage.output / "model"
    assert start.digest == digest_model_folder(start.path) != read_start(inputs).digest
    load_tokenizer(start.path, stage.config)

    def loss(folder: Path) -> float:
        batch = collate_supervised(PACKED, config=stage.config, pad_token_id=2)
        with torch.no_grad():
            return float(load_causal_lm(folder, torch.float32)(**batch).loss)

    before, after = loss(read_start(inputs).path), loss(start.path)
    assert after < before - 0.2
    steps = [e for e in read_events(tmp_path / "sft.jsonl") if e["kind"] == "metrics"]
    assert [(e["step"], e["total"]) for e in steps] == [(step, 25) for step in range(1, 26)]
    named = {row[0].strip("`") for row in table_rows(page_text("warm-start.md"), "## Metrics")}
    assert set(steps[0]["values"]) == named
    assert steps[-1]["values"]["sft/loss"] < steps[0]["values"]["sft/loss"]


@pytest.mark.parametrize("lora", [None, {"r": 4, "dropout": 0.1}], ids=["full", "lora_dropout"])
def test_a_stopped_warm_start_goes_on_exactly(
    tmp_path: Path, inputs: dict[str, Path], lora: dict[str, Any] | None
) -> None:
    class StopInTheThirdStep(EventWriter):
        def metrics(self, step: int, values: dict[str, float], total: int | None = None) -> None:
            if step == 2:
                stop.request("test")

    config, stop = sft_config(lora), StopSignal()
    whole = context(tmp_path / "whole", inputs, config)
    warm_start.run(whole)
    broken = tmp_path / "broken"
    with pytest.raises(Preempted, match="step 3 of 6"):
        warm_start.run(context(broken, inputs, config, stop=stop, events=StopInTheThirdStep(None, "sft")))
    kept = [path for path in (broken / "work").rglob("*") if path.is_file()]
    assert {path.suffix for path in kept} == {".json", ".safetensors"}
    torch.manual_seed(999)  # a new process would not have the old random state either
    again = context(broken, inputs, config)
    warm_start.run(again)
    name = "model/model.safetensors"
    one, other = load_file(whole.output / name), load_file(again.output / name)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_rows_without_a_supervised_token_are_refused(tmp_path: Path, inputs: dict[str, Path]) -> None:
    folder = tmp_path / "tokenize" / "train"
    folder.rename(tmp_path / "before")
    as_dataset([make_row([9], 1, prompt=9)]).save_to_disk(str(folder))
    with pytest.raises(UserError, match="no training row has a supervised token"):
        warm_start.run(context(tmp_path, inputs, sft_config()))


def test_adapters_of_the_output_layer_are_refused(tmp_path: Path, inputs: dict[str, Path]) -> None:
    config = sft_config({"target_modules": ["q_proj", "lm_head"]})
    with pytest.raises(UserError, match="output layer") as error:
        warm_start.run(context(tmp_path, inputs, config))
    assert error.value.where == "lora.target_modules"
