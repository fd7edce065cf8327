"""All weights of a model to a kept stub: as it runs, and by a restart where that does not work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ebft_core.errors import UserError
from ebft_core.vllm.model_sync import ModelPublisher
from tests.data.builders import byte_tokenizer
from tests.vllm_server.builders import Kept, inject, kept, served_config, stub_python, true_model
from tests.vllm_server.policies import CANARY, make_policy, truth

HOWS = ("as it runs", "not offered", "fails on the way")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return true_model(tmp_path_factory.mktemp("model"))[0]


@pytest.fixture
def holder(tmp_path: Path, model: Path) -> Iterator[Kept]:
    config = served_config(stub_python(tmp_path, tmp_path / "faults.json"), lora=None)
    with kept(tmp_path, config=config, model=model) as holder:
        holder.ready()
        yield holder


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
def test_the_server_gets_the_new_weights(holder: Kept, model: Path, tmp_path: Path, how: str) -> None:
    client, policy = holder.connect(), AutoModelForCausalLM.from_pretrained(model)
    published = ModelPublisher(
        client, tmp_path / "models", policy, byte_tokenizer(), CANARY, holder.spec.config,
        server_folder=holder.folder,
    )  # fmt: skip
    process = holder.state().server_pid
    if how == "not offered":
        inject(holder.faults, fail={"/pause?mode=wait": {"kind": "404"}})
    if how == "fails on the way":
        inject(holder.faults, fail={"/collective_rpc": {"kind": "500"}})
    with torch.no_grad():
        policy.model.norm.weight.mul_(1.5)
    assert published.publish(5).canary < 1e-4
    assert client.score(CANARY) == pytest.approx(truth(policy), abs=1e-4)
    assert (holder.state().server_pid == process) is (how == "as it runs")
    assert holder.state().generation == (0 if how == "as it runs" else 1)
    assert published.restarts == 0  # this one was asked for
    assert published.name_of(5) == holder.state().model_name
    with pytest.raises(ValueError, match="version 4 is not served; 5 is"):
        published.name_of(4)
    holder.kill()
    published.recover()
    assert published.restarts == 1
    assert client.score(CANARY) == pytest.approx(truth(policy), abs=1e-4)  # not those it was started with
    (only,) = (tmp_path / "models").iterdir()
    assert holder.state().model == str(only)
    published.close()


def test_a_server_of_the_users_cannot_be_given_them(holder: Kept, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be given all weights"):
        ModelPublisher(
            holder.connect(), tmp_path / "models", make_policy(model), None, CANARY, served_config(),
            server_folder=tmp_path,
        )  # fmt: skip
