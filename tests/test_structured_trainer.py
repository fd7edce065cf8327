"""Training on whole completions: order of rows, generation ahead, stand-ins, off-policy weights, resume."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ebft_core.blocks import Blocks
from ebft_core.config import RunConfig
from ebft_core.events import EventWriter
from ebft_core.losses import TokenTerms
from ebft_core.models import freeze_copy
from ebft_core.own_rewards import OwnRewards
from ebft_core.rows import collate_rows
from ebft_core.samplers.generate import GenerateSampler
from ebft_core.samplers.prompts import Group, PromptRequest, Sample
from ebft_core.samplers.protocol import OnGroup
from ebft_core.stop import StopSignal
from ebft_core.trainers.arguments import training_arguments
from ebft_core.trainers.checkpoints import newest_checkpoint
from ebft_core.trainers.groups import Candidate, StandIns
from ebft_core.trainers.off_policy import mean_log_ratio, off_policy_terms
from ebft_core.trainers.own import OwnScorer
from ebft_core.trainers.schedule import RolloutQueue, RowSchedule
from ebft_core.trainers.step import score
from ebft_core.trainers.structured import StructuredTrainer
from ebft_core.vllm.sync import Publication
from tests.trainer_fixtures import CPU, make_config, tiny_llama

STOP = 1
VOCAB = 40


def rows(count: int = 12) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(4)
    made = []
    for row_id in range(count):
        prompt, truth = torch.randint(3, 9, (2,), generator=generator).tolist()
        ids = torch.randint(2, VOCAB, (prompt + truth,), generator=generator).tolist()
        made.append(
            {
                "row_id": row_id,
                "input_ids": ids,
                "labels": [-100] * prompt + ids[prompt:],
                "is_target": [False] * prompt + [True] * truth,
                "document_lengths": [prompt + truth],
                "prompt_lengths": [prompt],
                "document_hashes": [str(row_id)],
            }
        )
    return made


def config_of(**sections: Any) -> RunConfig:
    ebft = {"mode": "structured", "max_completion_length": 6, "temperature": 0.9, **sections.pop("ebft", {})}
    rollout = {"use_vllm": False, **sections.pop("rollout", {})}
    trainer = {"micro_batch_size": 2, "batch_size": 4, "max_steps": 4, "learning_rate": 1e-3}
    trainer |= {"save_every": 2, "precision": "float32", "device": "cpu", **sections.pop("trainer", {})}
    data = {"sources": [{"path": "unused.txt"}], "sequence_length": 64, "transform": "prompt_completion"}
    return make_config(ebft=ebft, rollout=rollout, trainer=trainer, data=data, **sections)


class FakeSampler:
    """Writes made-up completions; `trouble` decides what fails."""

    def __init__(self, trouble: Callable[[int, PromptRequest], bool] = lambda call, request: False) -> None:
        self.trouble = trouble
        self.calls: list[tuple[int, list[int]]] = []
        self.alike = False
        self.lock = threading.Lock()

    def sample(
        self, requests: Sequence[PromptRequest], *, seed: int, version: int, on_group: OnGroup | None = None
    ) -> list[Group]:
        with self.lock:
            call = len(self.calls)
            self.calls.append((version, [request.row_id for request in requests]))
        groups = []
        for request in requests:
            if self.trouble(call, request):
                groups.append(Group(request.row_id, [None] * 4, "made up"))
            else:
                groups.append(Group(request.row_id, [self._sample(seed, request, j) for j in range(4)]))
            if on_group is not None:
                on_group(groups[-1])
        return groups

    def _sample(self, seed: int, request: PromptRequest, j: int) -> Sample:
        generator = torch.Generator().manual_seed(
            seed % 1000 + 10 * request.row_id + (0 if self.alike else j)
        )
        length = 1 + int(torch.randint(1, 6, (1,), generator=generator))
        ids = [*torch.randint(2, VOCAB, (length - 1,), generator=generator).tolist(), STOP]
        return Sample(ids, [True] * length, [-2.0] * length, length > 5)


class FakePublisher:
    def __init__(self) -> None:
        self.versions: list[int] = []
        self.restarts = 0

    def publish(self, version: int) -> Publication:
        self.versions.append(version)
        return Publication(version, f"policy-v{version}", 0.1, 0.01)

    def name_of(self, version: int) -> str:
        return f"policy-v{version}"

    def recover(self) -> None: ...

    def close(self) -> None: ...


def trainer_of(
    folder: Path,
    config: RunConfig,
    *,
    sampler: Any = None,
    publisher: Any = None,
    stop: StopSignal | None = None,
    model: Any = None,
) -> StructuredTrainer:
    policy = model or tiny_llama(VOCAB)
    trainer = config.trainer
    arguments = training_arguments(
        trainer,
        folder / "checkpoints",
        max_steps=trainer.max_steps or 1,
        device=CPU,
        precision=torch.float32,
    )
    schedule = RowSchedule(
        rows(),  # type: ignore[arg-type]
        batch_size=4,
        max_steps=trainer.max_steps or 1,
        num_iterations=config.rollout.num_iterations,
        seed=trainer.seed,
    )
    return StructuredTrainer(
        policy,
        config,
        arguments,
        schedule,
        sampler=sampler or GenerateSampler(policy, config, [STOP]),
        publisher=publisher,
        pad_token_id=0,
        attention="sdpa",
        feature_model=freeze_copy(policy, torch.float32, CPU),
        events=EventWriter(folder / "events.jsonl", "train"),
        stop=stop,
    )


def metrics_of(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event["values"] for event in lines if event["kind"] == "metrics"]


class TestSchedule:
    def test_every_epoch_reads_every_row_once_in_another_order(self) -> None:
        schedule = RowSchedule(rows(12), batch_size=4, max_steps=6, num_iterations=1, seed=3)  # type: ignore[arg-type]
        read = [schedule[i]["row_id"] for i in range(len(schedule))]
        assert sorted(read[:12]) == sorted(read[12:]) == list(range(12))
        assert read[:12] != read[12:]
        again = RowSchedule(rows(12), batch_size=4, max_steps=6, num_iterations=1, seed=3)  # type: ignore[arg-type]
        assert [again[i]["row_id"] for i in range(24)] == read

    def test_iterations_share_rows(self) -> None:
        schedule = RowSchedule(rows(12), batch_size=4, max_steps=5, num_iterations=2, seed=3)  # type: ignore[arg-type]
        steps = [[schedule[4 * s + i]["row_id"] for i in range(4)] for s in range(5)]
        assert steps[0] == steps[1] != steps[2] == steps[3] != steps[4]
        assert schedule.generations == 3
        assert [row["row_id"] for row in schedule.rows_of(1)] == steps[2]


class TestQueue:
    @staticmethod
    def queue(sampler: FakeSampler, depth: int, last: int = 5) -> RolloutQueue:
        def requests(generation: int) -> list[PromptRequest]:
            return [PromptRequest(100 * generation + i, [2, 3], [], 6) for i in range(3)]

        return RolloutQueue(sampler, requests, last=last, depth=depth, seed=0)

    def test_runs_ahead_no_further_than_asked_and_not_beyond_the_end(self) -> None:
        sampler = FakeSampler()
        queue = self.queue(sampler, depth=2, last=4)
        versions = [queue.take(g, version=g, oldest=g - 2).version for g in range(4)]
        assert versions == [0, 0, 0, 1]
        assert sorted(ids[0] // 100 for _, ids in sampler.calls) == [0, 1, 2, 3]

    def test_what_is_too_old_is_written_anew(self) -> None:
        sampler = FakeSampler()
        queue = self.queue(sampler, depth=1)
        queue.take(0, version=0, oldest=0)
        taken = queue.take(1, version=7, oldest=7)
        assert taken.version == 7
        assert [g.row_id for g in taken.groups] == [100, 101, 102]

    def test_an_error_reaches_whoever_takes_the_generation(self) -> None:
        def boom(call: int, request: PromptRequest) -> bool:
            if request.row_id >= 100:
                raise OSError("no server")
            return False

        queue = self.queue(FakeSampler(boom), depth=1)
        queue.take(0, version=0, oldest=0)
        with pytest.raises(OSError, match="no server"):
            queue.take(1, version=1, oldest=0)


def test_stand_ins_written_again_come_first_and_tries_end() -> None:
    def candidate(row_id: int, failed: bool = False) -> Candidate:
        sample = None if failed else Sample([2], [True], [-1.0], False)
        return Candidate({"row_id": row_id}, Group(row_id, [sample]), 0)

    stand_ins = StandIns(replay_size=2, max_rerolls=1)
    for row_id in (1, 2, 3):
        stand_ins.remember(candidate(row_id))
    assert stand_ins.note_failures([candidate(7, failed=True), candidate(8)]) == []
    assert [row["row_id"] for row in stand_ins.rows_to_try_again()] == [7]
    assert stand_ins.rows_to_try_again() == []
    stand_ins.add_written_again([candidate(7)])
    order = [stand_ins.next() for _ in range(4)]
    assert [None if c is None else c.group.row_id for c in order] == [7, 2, 3, None]
    stand_ins.note_failures([candidate(9, failed=True)])
    given_up = stand_ins.note_failures([candidate(9, failed=True)])
    assert [c.group.row_id for c in given_up] == [9]


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


def _off_policy(**rollout: Any) -> tuple[TokenTerms, float, Blocks, Tensor]:
    config = config_of(rollout={"use_vllm": True, **rollout}, lora={"r": 4})
    model = tiny_llama(VOCAB).eval()
    batch = collate_rows(rows(2), config, 0)
    tokens = torch.randint(2, VOCAB, (2, 1, 4, 5), generator=torch.Generator().manual_seed(0))
    length = torch.tensor([[[5, 3, 1, 4]], [[2, 5, 5, 1]]])
    action = torch.arange(5) < length[..., None]
    reported = -3.0 * torch.rand(tokens.shape, generator=torch.Generator().manual_seed(1)) * action
    truncated = torch.zeros_like(length, dtype=torch.bool)
    truncated[0, 0, 1] = True
    blocks = Blocks(tokens, length, action, reported, truncated)
    terms = TokenTerms(action.float(), action.float())
    changed, masked = off_policy_terms(
        terms, model, batch, blocks, config.ebft, config.rollout, attention="sdpa"
    )
    expected = torch.zeros(tokens.shape, dtype=torch.float64)
    for r in range(2):
        prompt = rows(2)[r]["input_ids"][: rows(2)[r]["prompt_lengths"][0]]
        for n in range(4):
            ids = torch.tensor([prompt + tokens[r, 0, n].tolist()])
            with torch.no_grad():
                logp = (model(ids).logits[0].double() / config.ebft.temperature).log_softmax(-1)
            for s in range(int(length[r, 0, n])):
                expected[r, 0, n, s] = logp[len(prompt) + s - 1, ids[0, len(prompt) + s]]
    return changed, masked, blocks, expected


def test_importance_ratios_and_masks_in_float64() -> None:
    terms, masked, blocks, expected = _off_policy(off_policy_mask_threshold=0.5, num_iterations=2)
    assert blocks.sampler_logprob_RANG is not None
    assert terms.old_logprob is not None
    torch.testing.assert_close(terms.old_logprob.double(), expected, atol=1e-5, rtol=0)
    difference = (blocks.sampler_logprob_RANG.double() - expected) * blocks.action_RANG
    kl = difference.sum(-1) / blocks.length_RAN
    torch.testing.assert_close(mean_log_ratio(blocks, expected.float()).double(), kl, atol=1e-5, rtol=0)
    kept = (kl <= 0.5)[..., None] & blocks.action_RANG
    assert 0 < int(kept.sum()) < int(blocks.action_RANG.sum())
    assert torch.equal(terms.weight != 0, kept)
    assert masked == pytest.approx(1 - int(kept.sum()) / int(blocks.action_RANG.sum()))


def test_truncated_completions_can_be_masked() -> None:
    config = config_of(ebft={"mask_truncated_completions": True}, rollout={"use_vllm": True}, lora={"r": 4})
    _, _, blocks, _ = _off_policy()
    action = blocks.action_RANG.float()
    terms, masked = off_policy_terms(
        TokenTerms(action, action), tiny_llama(VOCAB), collate_rows(rows(2), config, 0), blocks,
        config.ebft, config.rollout, attention="sdpa",
    )  # fmt: skip
    assert terms.weight[0, 0, 1].abs().sum() == 0
    assert terms.weight[0, 0, 0].abs().sum() == 5
    assert masked == pytest.approx(3 / int(action.sum()))


def test_own_rewards_are_added_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_length_reward.py").write_text(
        "def short(completion_ids, ground_truth, **kwargs):\n"
        "    assert all(isinstance(text, str) for text in ground_truth)\n"
        "    kwargs['log_metric']('longest', max(map(len, completion_ids)))\n"
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
        def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
            return "".join(chr(97 + i % 26) for i in ids)

    plain_folder, own_folder = tmp_path / "plain", tmp_path / "own"
    trainer_of(plain_folder, config, sampler=FakeSampler(), publisher=FakePublisher()).train()
    trainer = trainer_of(own_folder, config, sampler=FakeSampler(), publisher=FakePublisher())
    trainer.own = OwnScorer(OwnRewards(config.rewards), Letters())  # type: ignore[arg-type]
    trainer.train()
    (plain,), (own,) = metrics_of(plain_folder), metrics_of(own_folder)
    assert own["rewards/my_length_reward.short"] == pytest.approx(-own["rollout/completion_tokens"])
    assert 1 <= own["rewards/longest"] <= 6
    assert own["ebft/reward"] == pytest.approx(
        plain["ebft/reward"] + 0.5 * own["rewards/my_length_reward.short"], abs=1e-4
    )
