"""Training on whole completions: order of rows, generation ahead, stand-ins, off-policy weights, resume."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ebft_core.blocks import Blocks
from ebft_core.events import read_events
from ebft_core.own_rewards import OwnRewards
from ebft_core.rows import collate_rows
from ebft_core.samplers.prompts import Group, PromptRequest
from ebft_core.stop import StopSignal
from ebft_core.trainers.checkpoints import newest_checkpoint
from ebft_core.trainers.own import OwnScorer
from ebft_core.trainers.samples import RolloutSamples
from ebft_core.trainers.step import score
from tests.structured_fixtures import (
    VOCAB,
    FakePublisher,
    FakeSampler,
    config_of,
    metrics_of,
    rows,
    trainer_of,
)
from tests.trainer_fixtures import make_config, tiny_llama


def test_a_structured_example_is_a_row_with_one_anchor() -> None:
    """Same tokens, same anchor, same lengths: strided and structured mode score alike."""
    config = config_of(ebft={"embed_method": "mean_pooling"})
    strided = make_config(ebft={"embed_method": "mean_pooling", "generate_max_len": 5})
    model = tiny_llama(VOCAB).eval()
    made = [row for row in rows(40) if row["document_lengths"][0] - row["prompt_lengths"][0] == 5][:3]
    batch = collate_rows(made, config, 0)
    plain = collate_rows(made, strided, 0)
    anchors = torch.tensor([row["prompt_lengths"] for row in made])
    assert torch.equal(batch.anchors_RA, anchors)
    tokens = torch.randint(2, VOCAB, (3, 1, 4, 5), generator=torch.Generator().manual_seed(0))
    one = score(model, batch, Blocks.full(tokens, anchors), config.ebft, "sdpa")
    other = score(
        model,
        type(plain)(plain.input_ids_RL, plain.labels_RL, None, anchors, plain.row_ids_R),
        Blocks.full(tokens, anchors),
        strided.ebft,
        "sdpa",
    )
    torch.testing.assert_close(one.advantage_RAN, other.advantage_RAN)
    torch.testing.assert_close(one.cfm_RA, other.cfm_RA)


class TestTrainer:
    def test_learns_in_process_and_reports(self, tmp_path: Path) -> None:
        trainer = trainer_of(tmp_path, config_of())
        before = [p.clone() for p in trainer.model.parameters()]
        trainer.train()
        assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
        metrics = metrics_of(tmp_path)
        assert len(metrics) == 4
        for values in metrics:
            assert values["rollout/is_ratio_mean"] == pytest.approx(1.0, abs=1e-3)  # on policy
            assert values["rollout/effective_sample_size"] == pytest.approx(1.0, abs=1e-3)
            assert values["policy_lag"] == 0
            assert values["rollout/failed_prompts"] == 0
            assert 0 < values["rollout/completion_tokens"] <= 6
            assert math.isfinite(values["train/grad_norm"])

    def test_resume_is_bit_exact(self, tmp_path: Path) -> None:
        whole = trainer_of(tmp_path / "whole", config_of())
        whole.train()
        stop = StopSignal()
        first = trainer_of(tmp_path / "parts", config_of(), stop=stop)
        step = first.training_step

        def stopping(*args: Any, **kwargs: Any) -> Tensor:
            if first.state.global_step == 1:
                stop.request("test")
            return step(*args, **kwargs)

        first.training_step = stopping  # type: ignore[method-assign]
        first.train()
        assert first.state.global_step == 2
        second = trainer_of(tmp_path / "parts", config_of())
        second.train(resume_from_checkpoint=str(newest_checkpoint(tmp_path / "parts" / "checkpoints")))
        for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
            assert torch.equal(a, b)

    def test_weights_are_published_before_they_are_sampled_from(self, tmp_path: Path) -> None:
        sampler, publisher = FakeSampler(), FakePublisher()
        config = config_of(rollout={"use_vllm": True, "sync_interval": 2}, lora={"r": 4})
        trainer_of(tmp_path, config, sampler=sampler, publisher=publisher).train()
        assert publisher.versions == [0, 2]
        assert [version for version, _ in sampler.calls] == [0, 0, 2, 2]
        assert [m["policy_lag"] for m in metrics_of(tmp_path)] == [0, 1, 0, 1]

    def test_one_step_ahead(self, tmp_path: Path) -> None:
        sampler, publisher = FakeSampler(), FakePublisher()
        config = config_of(rollout={"use_vllm": True, "prefetch_depth": 1}, lora={"r": 4})
        trainer_of(tmp_path, config, sampler=sampler, publisher=publisher).train()
        assert publisher.versions == [0, 1, 2, 3]
        assert sorted(version for version, _ in sampler.calls) == [0, 0, 1, 2]
        metrics = metrics_of(tmp_path)
        assert [m["policy_lag"] for m in metrics] == [0, 1, 1, 1]
        assert all(m["rollout/is_ratio_min"] < m["rollout/is_ratio_max"] for m in metrics)

    def test_failed_prompts_are_asked_again_and_fill_free_places(self, tmp_path: Path) -> None:
        failed: list[int] = []

        def once(call: int, request: PromptRequest) -> bool:
            if call == 0 and not failed:
                failed.append(request.row_id)
                return True
            return call == 1 and request.row_id not in failed and len(failed) < 2 and not failed.append(-1)

        sampler = FakeSampler(once)
        config = config_of(rollout={"use_vllm": True}, lora={"r": 4})
        trainer_of(tmp_path, config, sampler=sampler, publisher=FakePublisher()).train()
        metrics = metrics_of(tmp_path)
        assert [m["rollout/failed_prompts"] for m in metrics] == [1, 1, 0, 0]
        assert failed[0] in sampler.calls[1][1][4:]  # asked again behind the step's own four
        assert metrics[0]["ebft/dropped_groups"] == 1
        assert metrics[1]["ebft/dropped_groups"] == 0  # its place went to the one written again
        assert metrics[1]["rollout/replaced_groups"] == 1

    def test_a_step_without_any_completion_stops_the_run(self, tmp_path: Path) -> None:
        sampler = FakeSampler(lambda call, request: True)
        config = config_of(rollout={"use_vllm": True}, lora={"r": 4})
        with pytest.raises(RuntimeError, match="made up"):
            trainer_of(tmp_path, config, sampler=sampler, publisher=FakePublisher()).train()

    def test_groups_without_signal_are_replaced_from_the_buffer_or_skipped(self, tmp_path: Path) -> None:
        class Alike(FakeSampler):
            def sample(self, *args: Any, **kwargs: Any) -> list[Group]:
                self.alike = len(self.calls) > 0
                return super().sample(*args, **kwargs)

        for size, replaced in ((0, 0.0), (2, 2.0)):
            folder = tmp_path / str(size)
            config = config_of(
                rollout={"use_vllm": True, "replay_buffer_size": size},
                lora={"r": 4},
                trainer={"max_steps": 2},
            )
            trainer_of(folder, config, sampler=Alike(), publisher=FakePublisher()).train()
            second = metrics_of(folder)[1]
            assert second["rollout/replaced_groups"] == replaced
            assert (second["train/grad_norm"] > 0) == (size > 0)

    def test_several_iterations_share_completions(self, tmp_path: Path) -> None:
        sampler = FakeSampler()
        config = config_of(rollout={"use_vllm": True, "num_iterations": 2, "sync_interval": 2}, lora={"r": 4})
        trainer_of(tmp_path, config, sampler=sampler, publisher=FakePublisher()).train()
        assert len(sampler.calls) == 2
        assert len(metrics_of(tmp_path)) == 4


def test_own_rewards_are_added_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_length_reward.py").write_text(
        "def short(completion_ids, ground_truth, **kwargs):\n"
        "    assert all(isinstance(text, str) for text in ground_truth)\n"
        "    kwargs['log_metric']('longest', max(map(len, completion_ids)))\n"
        "    kwargs['log_extra']('tokens', [len(ids) for ids in completion_ids])\n"
        "    return [float(-len(ids)) for ids in completion_ids]\n"
    )
    monkeypatch.chdir(tmp_path)
    config = config_of(
        rollout={"use_vllm": True},
        lora={"r": 4},
        rewards=[{"module": "my_length_reward:short", "weight": 0.5}],
        trainer={"max_steps": 1},
    )

    class Letters:
        def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
            return "".join(chr(97 + i % 26) for i in ids)

    plain_folder, own_folder = tmp_path / "plain", tmp_path / "own"
    trainer_of(plain_folder, config, sampler=FakeSampler(), publisher=FakePublisher()).train()
    trainer = trainer_of(own_folder, config, sampler=FakeSampler(), publisher=FakePublisher())
    trainer.own = OwnScorer(OwnRewards(config.rewards), Letters())  # type: ignore[arg-type]
    trainer.samples = RolloutSamples(trainer.events, Letters(), every=1)
    trainer.train()
    (plain,), (own,) = metrics_of(plain_folder), metrics_of(own_folder)
    assert own["rewards/my_length_reward.short"] == pytest.approx(-own["rollout/completion_tokens"])
    assert 1 <= own["rewards/longest"] <= 6
    assert own["ebft/reward"] == pytest.approx(
        plain["ebft/reward"] + 0.5 * own["rewards/my_length_reward.short"], abs=1e-4
    )
    journal = next(own_folder.rglob("*.jsonl"))
    (shown,) = [event for event in read_events(journal) if event["kind"] == "samples"]
    assert shown["rows"]
    assert all(row["columns"] == {"tokens": str(len(row["sample"]))} for row in shown["rows"])
