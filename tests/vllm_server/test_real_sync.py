"""The real vLLM server: versions, canary, sampling of several turns, a restart; one server for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ebft_core.samplers.distribution import sampling_logprobs
from ebft_core.samplers.prompts import Sample
from ebft_core.samplers.vllm import VLLMSampler, connect
from ebft_core.vllm.model_sync import ModelPublisher
from ebft_core.vllm.sync import AdapterPublisher
from tests.data.builders import byte_tokenizer
from tests.oracles.tiny_models import with_lora
from tests.samplers.builders import request
from tests.vllm_server.builders import REAL_PYTHON, REAL_SERVER, Kept, kept, served_config, true_model

pytestmark = REAL_SERVER

CANARY = [5, 80, 200, 7, 7, 31, 0, 99, 256, 12]
STOPS = [256, *range(0, 250, 11)]
TRUNCATED = {"temperature": 0.9, "top_p": 0.9, "top_k": 60, "min_p": 0.01, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Kept, Any]]:
    folder = tmp_path_factory.mktemp("real")
    model, _ = true_model(folder)
    config = served_config(
        REAL_PYTHON,
        vllm={
            "startup_timeout": 240.0, "health_interval": 3.0, "hang_timeout": 20.0,
            "dtype": "float32", "enforce_eager": True,
        },
        data={"transform": "prompt_completion"},
        ebft={"mode": "structured", "max_completion_length": 32, **TRUNCATED},
        rollout={"prefetch_depth": 1, "request_attempts": 2},
    )  # fmt: skip
    with kept(folder, config=config, model=model) as holder:
        holder.ready(seconds=240.0)
        yield holder, with_lora(AutoModelForCausalLM.from_pretrained(model))


def exact(policy: torch.nn.Module, prompt: list[int], sample: Sample, config: Any) -> list[float]:
    """The sample's log-probabilities by one plain forward pass and the in-process sampler's truncations."""
    history = prompt + sample.token_ids
    with torch.no_grad():
        logits = policy(input_ids=torch.tensor([history])).logits[0]
    found = []
    for s, (token, action) in enumerate(zip(sample.token_ids, sample.action, strict=True)):
        at = len(prompt) + s
        seen = torch.zeros(1, logits.shape[1], dtype=torch.bool)
        seen[0, history[:at]] = True
        logprobs = sampling_logprobs(logits[at - 1 : at], seen, config.ebft)
        found.append(float(logprobs[0, token]) if action else 0.0)
    return found


def test_versions_turns_truncation_and_a_restart(server: tuple[Kept, Any], tmp_path: Path) -> None:
    holder, policy = server
    config = holder.spec.config
    client = connect(holder.state().url, holder.state().model_name, config)
    published = AdapterPublisher(
        client, tmp_path / "adapters", policy, CANARY, config, server_folder=holder.folder
    )
    sampler = VLLMSampler(client, config, STOPS, published)
    wanted = [request(row, [row + 1, 80, 200], length=24, given=[[7, 8, 9]]) for row in range(4)]
    assert published.publish(0).canary < 1e-3
    before = sampler.sample(wanted, seed=1, version=0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-1.0)
    assert published.publish(1).canary < 1e-3
    groups = sampler.sample(wanted, seed=1, version=1)
    assert groups != before
    turns = 0
    for asked, group in zip(wanted, groups, strict=True):
        for sample in group.samples:
            assert sample is not None
            assert sample.logprobs == pytest.approx(exact(policy, asked.prompt_ids, sample, config), abs=2e-3)
            turns += not all(sample.action)
    assert turns
    assert sampler.sample(wanted, seed=1, version=0) == before  # the older version is still there
    os.kill(int(holder.state().server_pid or 0), signal.SIGKILL)
    again = sampler.sample(wanted, seed=1, version=1)
    assert published.restarts == 1
    assert [[s and s.token_ids for s in group.samples] for group in again] == [
        [s and s.token_ids for s in group.samples] for group in groups
    ]
    published.close()


def test_all_weights_go_to_the_server_as_it_runs(tmp_path: Path) -> None:
    model, _ = true_model(tmp_path)
    config = served_config(
        REAL_PYTHON,
        vllm={"startup_timeout": 240.0, "hang_timeout": 20.0, "dtype": "float32", "enforce_eager": True},
        lora=None,
    )
    policy = AutoModelForCausalLM.from_pretrained(model)
    with kept(tmp_path, config=config, model=model) as holder:
        process = holder.ready(seconds=240.0).server_pid
        published = ModelPublisher(
            holder.connect(), tmp_path / "models", policy, byte_tokenizer(), CANARY, config,
            server_folder=holder.folder,
        )  # fmt: skip
        for version in (1, 2):  # the second one is taken from another folder than the first
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.mul_(1.2)
            assert published.publish(version).canary < 1e-3
        assert holder.state().server_pid == process
        holder.kill()
        published.recover()
        assert published.publish(3).canary < 1e-3
