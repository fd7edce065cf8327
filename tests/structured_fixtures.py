"""Rows, made-up samplers and trainers for the tests of structured mode."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ebft_core.config import RunConfig
from ebft_core.events import EventWriter
from ebft_core.models import freeze_copy
from ebft_core.samplers.generate import GenerateSampler
from ebft_core.samplers.prompts import Group, PromptRequest, Sample
from ebft_core.samplers.protocol import OnGroup
from ebft_core.stop import StopSignal
from ebft_core.trainers.arguments import count_steps, training_arguments
from ebft_core.trainers.schedule import RowSchedule
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
    max_steps = count_steps(trainer, len(rows()))
    arguments = training_arguments(
        trainer,
        folder / "checkpoints",
        max_steps=max_steps,
        device=CPU,
        precision=torch.float32,
    )
    schedule = RowSchedule(
        rows(),  # type: ignore[arg-type]
        batch_size=4,
        max_steps=max_steps,
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
