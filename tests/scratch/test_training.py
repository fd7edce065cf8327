"""Training a base model from nothing: it learns, repeats bit by bit, and survives being killed."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from ebft_core.base_model import digest_model_folder, read_base
from ebft_core.config import FromScratchConfig
from ebft_core.errors import UserError, UserErrors
from ebft_core.events import read_events
from ebft_core.scratch import training
from ebft_core.scratch.checkpoints import load_checkpoint, save_checkpoint
from ebft_core.scratch.corpus import make_corpus, read_corpus
from ebft_core.stage_runner import Preempted
from ebft_core.stages import prepare_base
from ebft_core.tokenizer import load_tokenizer
from tests.data.builders import byte_tokenizer, run_config, stage_context

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 1,
    "sources": ["stdlib:json/*.py"],
    "max_steps": 6,
    "batch_size": 3,
    "sequence_length": 64,
}


def context_for(root: Path, **fields: Any) -> Any:
    config = run_config(["stdlib:abc.py"], model={"from_scratch": {**SMALL, **fields}})
    return stage_context(root, config)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    context = context_for(tmp_path_factory.mktemp("made"))
    prepare_base.run(context)
    return context.output


def test_the_result_is_a_complete_model_folder(made: Path) -> None:
    base = read_base(made)
    assert (base.source, base.path) == ("from_scratch", made / "model")
    assert base.digest == digest_model_folder(made / "model")
    model = AutoModelForCausalLM.from_pretrained(base.path)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    tokenizer = load_tokenizer(base.path, run_config(["x"]).model)
    assert model.config.vocab_size == len(tokenizer) == 258
    assert (model.config.eos_token_id, model.config.pad_token_id) == (256, 257)


def test_heldout_ce_is_the_one_of_the_saved_model(made: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(made / "model").eval()
    corpus = make_corpus(read_corpus(SMALL["sources"]), byte_tokenizer(), 64)
    rows = corpus.heldout_NL[: training.EVAL_SEQUENCES]
    with torch.no_grad():
        logits = torch.cat([model(rows[i : i + 1]).logits for i in range(len(rows))])
    expected = cross_entropy(logits[:, :-1].reshape(-1, 258), rows[:, 1:].reshape(-1))
    assert read_base(made).metrics["heldout_ce"] == pytest.approx(float(expected), rel=1e-5)


def test_every_step_is_reported(made: Path) -> None:
    events = [e for e in read_events(made.parent / "events.jsonl") if e["kind"] == "metrics"]
    assert [(e["step"], e["total"]) for e in events] == [(i, 6) for i in range(1, 7)]
    first = events[0]["values"]
    assert first["base/ce_loss"] == pytest.approx(math.log(258), abs=0.2)  # an untrained model guesses
    assert set(first) == {"base/ce_loss", "train/learning_rate"}


def test_the_seed_decides_every_bit(made: Path, tmp_path: Path) -> None:
    again, other = context_for(tmp_path / "again"), context_for(tmp_path / "other", seed=1)
    prepare_base.run(again)
    prepare_base.run(other)
    assert equal(weights(again.output), weights(made))
    assert not equal(weights(other.output), weights(made))


def test_it_learns(tmp_path: Path) -> None:
    context = context_for(tmp_path, max_steps=60, batch_size=8, learning_rate=1e-2)
    metrics = prepare_base.run(context)
    assert metrics["heldout_ce"] < 3.8  # 5.55 is guessing; 3.5 or so is knowing how frequent each byte is


def test_a_stop_request_leaves_a_checkpoint_and_the_rest_ends_equal(made: Path, tmp_path: Path) -> None:
    context = context_for(tmp_path)

    class StopAtThree:
        def __init__(self) -> None:
            self.looks = 0

        @property
        def requested(self) -> bool:
            self.looks += 1
            return self.looks == 3  # once only, so a second look would miss it

    object.__setattr__(context, "stop", StopAtThree())
    with pytest.raises(Preempted):
        prepare_base.run(context)
    assert [p.name for p in context.work.glob("step-*")] == ["step-00000003"]
    resumed = context_for(tmp_path / "resumed")
    object.__setattr__(resumed, "work", context.work)
    prepare_base.run(resumed)
    steps = [e["step"] for e in read_events(resumed.events.path) if e["kind"] == "metrics"]
    assert steps == [4, 5, 6]
    assert equal(weights(resumed.output), weights(made))


def test_a_killed_process_resumes_to_the_same_weights(tmp_path: Path) -> None:
    fields = {"max_steps": 12, "seed": 3}
    whole = context_for(tmp_path / "whole", **fields)
    prepare_base.run(whole)
    script = (
        "import sys, time; from pathlib import Path; import torch; torch.set_num_threads(1)\n"
        "from tests.scratch.test_training import context_for, prepare_base, training\n"
        "training.SAVE_EVERY = 4; update = training._update\n"
        "def slow(*a):\n    time.sleep(0.05); return update(*a)\n"
        "training._update = slow\n"
        f"prepare_base.run(context_for(Path(sys.argv[1]), **{fields!r}))"
    )
    cut = tmp_path / "cut"
    process = subprocess.Popen([sys.executable, "-c", script, str(cut)], stderr=subprocess.DEVNULL)
    while not list(cut.glob("work/step-*")) and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    resumed = context_for(tmp_path / "resumed", **fields)
    object.__setattr__(resumed, "work", cut / "work")
    prepare_base.run(resumed)
    assert equal(weights(resumed.output), weights(whole.output))
    steps = [e["step"] for e in read_events(resumed.events.path) if e["kind"] == "metrics"]
    assert steps[0] > 4


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    config = FromScratchConfig(**SMALL)
    model = training.make_model(config, byte_tokenizer())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 4, dtype=torch.int64)).logits.sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path, 5, model, optimizer)
    assert load_checkpoint(tmp_path, model, optimizer) == 5
    (tmp_path / "step-00000005" / "optimizer.safetensors").write_bytes(b"torn")
    assert load_checkpoint(tmp_path, model, optimizer) == 0


def test_each_pass_over_the_data_takes_every_sequence_once() -> None:
    config = FromScratchConfig(**{**SMALL, "batch_size": 4})
    data_NL = torch.arange(10)[:, None]
    rows = [int(i) for step in range(5) for i in training.batch_RL(data_NL, step, config)]
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert rows[:10] != rows[10:]


def test_learning_rate_warms_up_and_falls_to_zero() -> None:
    config = FromScratchConfig(**{**SMALL, "max_steps": 100, "learning_rate": 1.0})
    rates = [training.learning_rate(step, config) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] < 1e-3


def test_documents_are_joined_by_eos_and_kept_apart_from_heldout() -> None:
    texts = [chr(ord("a") + i) * 7 for i in range(20)]
    corpus = make_corpus(texts, byte_tokenizer(), 8)
    rows = [bytes(row[:7].tolist()).decode() for row in [*corpus.train_NL, *corpus.heldout_NL]]
    assert sorted(rows) == texts
    assert {int(row[7]) for row in [*corpus.train_NL, *corpus.heldout_NL]} == {256}
    assert len(corpus.heldout_NL) == 1


def test_one_document_keeps_its_end_as_heldout_text() -> None:
    corpus = make_corpus(["".join(chr(33 + i % 90) for i in range(400))], byte_tokenizer(), 10)
    assert (corpus.train_NL.shape, corpus.heldout_NL.shape) == ((38, 10), (2, 10))


def test_texts_that_cannot_train_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="too little text"):
        make_corpus(["ab", "cd"], byte_tokenizer(), 64)
    (tmp_path / "a.txt").write_bytes(b"x\xff")
    with pytest.raises(UserErrors, match="not text"):
        read_corpus([str(tmp_path / "*.txt")])
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "x"}))
    with pytest.raises(UserError, match="not whole-file text"):
        read_corpus([str(tmp_path / "*.jsonl")])
    with pytest.raises(UserError, match="no data files") as caught:
        read_corpus([str(tmp_path / "*.md")])
    assert caught.value.where == "model.from_scratch.sources[0].path"
