"""The trainer: exact resume, exact accumulation, checkpoints without pickle, metrics, stopping."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ebft_core.errors import UserError
from ebft_core.events import EventWriter, read_events
from ebft_core.models import _with_new_adapters
from ebft_core.stop import StopSignal
from ebft_core.trainers.checkpoints import newest_checkpoint
from ebft_core.trainers.ebft import alike_in_length
from tests.trainer_fixtures import make_config, make_rows, make_trainer, tiny_llama, weights

METRICS = {
    *(
        f"ebft/{n}"
        for n in ("alignment", "diversity", "reward", "cfm", "cfm_biased", "rl_loss", "ce_loss", "kl")
    ),
    *(
        f"ebft/{n}"
        for n in ("advantage_std", "duplicate_rate", "zero_advantage_rate", "dropped_groups", "entropy")
    ),
    "rollout/tokens_per_second",
    "perf/tokens_spared",
    *(
        f"perf/{n}"
        for n in ("step_seconds", "rollout_seconds", "features_seconds", "update_seconds", "peak_memory_mb")
    ),
    "train/grad_norm",
    "train/learning_rate",
    "train/loss",
}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], **tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)


class _StopAt(EventWriter):
    """Requests a stop once a journal has seen the metrics of a step."""

    def __init__(self, step: int, stop: StopSignal) -> None:
        super().__init__(None, "train")
        self.step, self.stop = step, stop

    def metrics(self, step: int, values: dict[str, float], total: int | None = None) -> None:
        if step == self.step:
            self.stop.request("test")


@pytest.mark.parametrize("lora", [None, {"r": 4, "dropout": 0.1}], ids=["full", "lora_dropout"])
def test_resume_is_bit_exact(tmp_path: Path, lora: dict | None) -> None:
    config = make_config(
        lora=lora,
        ebft={"ce_coef": 0.3, "kl_coef": 0.1, "ema_decay": 0.9},
        trainer={"max_steps": 7, "save_every": 3, "micro_batch_size": 2, "batch_size": 4},
    )

    def policy() -> torch.nn.Module:
        return tiny_llama() if config.lora is None else _with_new_adapters(tiny_llama(), config.lora, 0)

    whole = make_trainer(tmp_path / "whole", config, policy=policy())
    whole.train()
    for stop_at in (1, 3, 5):  # inside the first epoch, at its end, inside the second
        folder = tmp_path / f"broken{stop_at}"
        stop = StopSignal()
        first = make_trainer(folder, config, policy=policy(), stop=stop, events=_StopAt(stop_at, stop))
        first.train()
        checkpoint = newest_checkpoint(folder)
        assert checkpoint is not None
        assert first.state.global_step < 7
        torch.manual_seed(999)  # a new process would not have the old random state either
        second = make_trainer(folder, config, policy=policy())
        second.train(resume_from_checkpoint=str(checkpoint))
        assert second.state.global_step == 7
        assert_same(weights(second), weights(whole), rtol=0, atol=0)
        assert_same(second.average.average, whole.average.average, rtol=0, atol=0)


@pytest.mark.parametrize("split", [(1, 4), (2, 2)])
def test_micro_batches_do_not_change_the_update(tmp_path: Path, split: tuple[int, int]) -> None:
    # Adam's first step hides the gradient's size, so a plain SGD-like comparison is made on gradients.
    def gradients(micro: int, accumulation: int) -> dict[str, torch.Tensor]:
        config = make_config(
            ebft={"ce_coef": 0.5, "kl_coef": 0.2},
            trainer={
                "micro_batch_size": micro,
                "gradient_accumulation_steps": accumulation,
                "max_steps": 1,
                "max_grad_norm": 1e9,
            },
        )
        trainer = make_trainer(tmp_path / f"{micro}", config)
        # The same four rows in one step, whatever the sampler's order.
        trainer.train_dataset = make_rows(4)
        caught: dict[str, torch.Tensor] = {}
        step = torch.optim.AdamW.step

        def spy(self, *args, **kwargs):
            caught.update({n: p.grad.clone() for n, p in trainer.model.named_parameters()})
            return step(self, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim.AdamW, "step", spy)
            trainer.train()
        return caught

    reference = gradients(4, 1)
    assert max(float(g.abs().max()) for g in reference.values()) > 1e-3
    assert_same(gradients(*split), reference, rtol=1e-4, atol=1e-6)


def test_checkpoints_hold_no_pickle_and_are_rotated(tmp_path: Path) -> None:
    config = make_config(trainer={"max_steps": 5, "save_every": 1, "keep_checkpoints": 2})
    make_trainer(tmp_path, config).train()
    folders = sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("checkpoint"))
    assert folders == ["checkpoint-4", "checkpoint-5"]
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert {p.suffix for p in files} == {".safetensors", ".json"}
    for path in files:
        load_file(path) if path.suffix == ".safetensors" else json.loads(path.read_text())


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    config = make_config(trainer={"max_steps": 4, "save_every": 2})
    make_trainer(tmp_path, config).train()
    newest = newest_checkpoint(tmp_path)
    assert newest.name == "checkpoint-4"
    content = bytearray((newest / "trainable.safetensors").read_bytes())
    content[-3] ^= 1
    (newest / "trainable.safetensors").write_bytes(bytes(content))
    assert newest_checkpoint(tmp_path).name == "checkpoint-2"


def test_every_metric_is_reported_at_every_step(tmp_path: Path) -> None:
    config = make_config(ebft={"ce_coef": 0.1, "kl_coef": 0.1}, trainer={"max_steps": 3})
    journal = tmp_path / "events.jsonl"
    make_trainer(tmp_path / "out", config, events=EventWriter(journal, "train")).train()
    events = [e for e in read_events(journal) if e["kind"] == "metrics"]
    assert [e["step"] for e in events] == [1, 2, 3]
    for event in events:
        assert set(event["values"]) == METRICS
        assert all(math.isfinite(float(v)) for v in event["values"].values())
        assert event["total"] == 3
    assert events[0]["values"]["ebft/kl"] == pytest.approx(0.0, abs=1e-6)  # the policy is still the reference


def test_evaluation_during_training_is_logged_and_changes_nothing(tmp_path: Path) -> None:
    """`eval_every` adds `eval/` metrics at its steps; the weights end up the same with and without it."""
    ends = []
    for eval_every in (None, 2):
        config = make_config(trainer={"max_steps": 4, "eval_every": eval_every, "micro_batch_size": 2})
        journal = tmp_path / f"events{eval_every}.jsonl"
        rows = make_rows(4, seed=5)
        for row in rows:
            row["document_hashes"] = [f"document {row['row_id']}"]
        trainer = make_trainer(
            tmp_path / f"out{eval_every}", config, events=EventWriter(journal, "train"), heldout=rows
        )
        trainer.train()
        ends.append(weights(trainer))
        evaluations = {e["step"]: e["values"] for e in read_events(journal) if "eval/cfm" in e["values"]}
        assert list(evaluations) == ([] if eval_every is None else [2, 4])
        assert all({"eval/ce", "eval/alignment"} <= set(values) for values in evaluations.values())
    assert_same(ends[0], ends[1], rtol=0, atol=0)


def test_training_raises_alignment_on_a_repeated_batch(tmp_path: Path) -> None:
    config = make_config(
        ebft={"whitening": "none", "temperature": 1.0, "n_samples_per_prompt": 8},
        trainer={"max_steps": 60, "save_every": 1000, "micro_batch_size": 2, "learning_rate": 5e-3},
    )
    journal = tmp_path / "events.jsonl"
    make_trainer(tmp_path / "o", config, rows=make_rows(2), events=EventWriter(journal, "train")).train()
    cfm = [e["values"]["ebft/cfm"] for e in read_events(journal)]
    assert sum(cfm[-10:]) / 10 < sum(cfm[:10]) / 10 - 0.1


def test_unusable_features_stop_the_run(tmp_path: Path) -> None:
    policy = tiny_llama()
    trainer = make_trainer(tmp_path, make_config(), policy=policy)
    with torch.no_grad():
        trainer.feature_model.model.layers[0].mlp.down_proj.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="unusable features") as caught:
        trainer.train()
    assert caught.value.where == "ebft.max_dropped_fraction"


def test_a_diverged_policy_is_not_stepped(tmp_path: Path) -> None:
    policy = tiny_llama()
    trainer = make_trainer(tmp_path, make_config(), policy=policy)
    with torch.no_grad():
        policy.lm_head.weight.fill_(float("inf"))
    with pytest.raises(FloatingPointError):
        trainer.train()


def test_rows_of_a_step_are_grouped_by_length() -> None:
    parts = [[{"input_ids": [0] * n} for n in part] for part in ([3, 9, 1], [8, 2, 7])]
    grouped = alike_in_length(parts)
    assert [[len(row["input_ids"]) for row in part] for part in grouped] == [[9, 8, 7], [3, 2, 1]]
    assert [len(part) for part in alike_in_length([parts[0], parts[1][:1]])] == [3, 1]
