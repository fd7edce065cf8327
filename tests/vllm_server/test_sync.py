"""Weight syncs against the stub with true weights: versions, canary, refusals, restarts under the keeper."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from ebft_core.config import RunConfig
from ebft_core.errors import UserError
from ebft_core.samplers.vllm import VLLMSampler
from ebft_core.vllm.client import ServerGone, VLLMClient
from ebft_core.vllm.state import ServerLost
from ebft_core.vllm.sync import AdapterPublisher
from tests.samplers.builders import request
from tests.vllm_server.builders import (
    Kept,
    inject,
    kept,
    running_stub,
    served_config,
    stub_python,
    true_model,
)
from tests.vllm_server.policies import CANARY, make_policy, train, truth

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return true_model(tmp_path_factory.mktemp("model"))[0]


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[tuple[str, Path]]:
    with running_stub(tmp_path_factory.mktemp("stub"), model=model) as started:
        yield started


@pytest.fixture
def client(stub: tuple[str, Path]) -> Iterator[VLLMClient]:
    inject(stub[1])
    client = VLLMClient(stub[0], "theirs", timeout=10.0, attempts=3)
    yield client
    inject(stub[1])
    for served in client.models():
        if served.parent is not None:
            client.unload_adapter(served.name)


@pytest.fixture
def faults(stub: tuple[str, Path]) -> Path:
    return stub[1]


def publisher(
    client: VLLMClient, folder: Path, policy: torch.nn.Module, config: RunConfig | None = None, **options: Any
) -> AdapterPublisher:
    return AdapterPublisher(client, folder / "adapters", policy, CANARY, config or served_config(), **options)


def served(client: VLLMClient) -> list[str]:
    return [entry.name for entry in client.models() if entry.parent is not None]


def folders(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "adapters").iterdir())


def test_each_version_is_served_with_its_own_weights_until_it_is_too_old(
    client: VLLMClient, model: Path, tmp_path: Path
) -> None:
    policy = make_policy(model)
    config = served_config(rollout={"prefetch_depth": 1})  # hence a staleness bound of 1
    published = publisher(client, tmp_path, policy, config)
    scores: dict[int, list[float]] = {}
    for version in range(3):
        train(policy, version)
        publication = published.publish(version)
        assert publication.name == published.name_of(version)
        assert publication.name.startswith(f"policy-v{version}-")
        assert publication.canary < 1e-4
        scores[version] = truth(policy)
        names = [published.name_of(v) for v in (version - 1, version) if v >= 0]
        assert served(client) == folders(tmp_path) == names
        for name, v in zip(names, (version - 1, version)[-len(names) :], strict=True):
            assert client.score(CANARY, name) == pytest.approx(scores[v], abs=1e-4)
    assert max(abs(a - b) for a, b in zip(scores[1], scores[2], strict=True)) > 0.1
    with pytest.raises(ValueError, match=r"version 0 is not published; these are: \[1, 2\]"):
        published.name_of(0)
    with pytest.raises(ValueError, match="version 2 is published already"):
        published.publish(2)
    content = {path.name for path in (tmp_path / "adapters" / published.name_of(2)).iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= content
    assert not any(name.endswith((".bin", ".pt")) for name in content)
    published.close()
    assert (served(client), folders(tmp_path)) == ([], [])


def test_the_canary_names_both_numbers_and_the_causes(
    client: VLLMClient, model: Path, tmp_path: Path
) -> None:
    policy = make_policy(model)
    published = publisher(client, tmp_path, policy)
    published.publish(0)
    (written,) = client.complete(CANARY[:1], max_tokens=7, seed=0, model=published.name_of(0))
    theirs = truth(policy, [*CANARY[:1], *written.token_ids])
    with torch.no_grad():  # what no adapter carries: the server's base is another one now
        for name, parameter in policy.named_parameters():
            if "lora_" not in name and parameter.ndim == 2:
                parameter.mul_(1.2)
    ours = truth(policy, [*CANARY[:1], *written.token_ids])
    with pytest.raises(UserError, match="does not compute what the trainer computes") as caught:
        published.publish(1)
    error = caught.value
    assert error.where == "rollout.canary_tolerance"
    assert f"server {sum(theirs) / 7:.4f} (policy-v1-" in str(error.value)
    assert f"trainer {sum(ours) / 7:.4f}" in str(error.value)
    difference = sum(abs(a - b) for a, b in zip(theirs, ours, strict=True)) / 7
    assert f"mean difference {difference:.4f}" in str(error.value)
    assert "another base model" in str(error.hint)
    assert served(client) == [published.name_of(0)]
    published.close()


def test_a_policy_of_no_numbers_does_not_pass_the_canary(
    client: VLLMClient, model: Path, tmp_path: Path
) -> None:
    policy = make_policy(model)
    published = publisher(client, tmp_path, policy)
    policy.get_base_model().model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(UserError, match="trainer nan"):
        published.publish(0)
    published.close()


def test_a_refused_adapter_is_said_in_the_servers_words(
    client: VLLMClient, model: Path, faults: Path, tmp_path: Path
) -> None:
    published = publisher(client, tmp_path, make_policy(model))
    inject(faults, refuse_lora="the modules do not suit")
    with pytest.raises(UserError, match=r"the modules do not suit \(HTTP 400\)"):
        published.publish(0)
    assert (served(client), folders(tmp_path)) == ([], [])
    inject(faults)
    published.publish(0)
    published.close()


def test_a_rank_beyond_the_servers_is_refused(client: VLLMClient, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="LoRA rank 16 is greater than max_lora_rank 8"):
        publisher(client, tmp_path, make_policy(model, rank=16)).publish(0)


@pytest.mark.parametrize("kind", ["reset", "cut", "500"])
@pytest.mark.parametrize("path", [LOAD, UNLOAD, "/v1/completions", "/v1/models"])
def test_passing_faults_do_not_disturb_a_publication(
    client: VLLMClient, model: Path, faults: Path, tmp_path: Path, path: str, kind: str
) -> None:
    published = publisher(client, tmp_path, make_policy(model))
    published.publish(0)
    inject(faults, fail={path: {"kind": kind, "times": 2}})
    published.publish(1)
    assert served(client) == [published.name_of(1)]
    published.close()


def test_lasting_faults_end_a_publication_which_can_be_tried_again(
    client: VLLMClient, model: Path, faults: Path, tmp_path: Path
) -> None:
    published = publisher(client, tmp_path, make_policy(model))
    inject(faults, fail={LOAD: {"kind": "503", "times": 50}})
    with pytest.raises(ServerGone, match=LOAD):
        published.publish(0)
    assert (published.restarts, folders(tmp_path)) == (0, [])
    inject(faults)
    published.publish(0)
    assert served(client) == [published.name_of(0)]
    published.close()


@pytest.mark.parametrize("folder_left", [True, False])
def test_what_a_killed_process_left_is_removed_and_its_names_are_not_used_again(
    client: VLLMClient, model: Path, tmp_path: Path, folder_left: bool
) -> None:
    policy = make_policy(model)
    first = publisher(client, tmp_path, policy)
    first.publish(4)
    if folder_left:
        (tmp_path / "adapters" / ".staging-5").mkdir()
    else:
        shutil.rmtree(tmp_path / "adapters")
    second = publisher(client, tmp_path, policy)
    assert (served(client), folders(tmp_path)) == ([], [])
    second.publish(4)
    assert second.name_of(4) != first.name_of(4)
    assert served(client) == folders(tmp_path) == [second.name_of(4)]
    second.close()


def test_adapters_of_others_are_left_alone(client: VLLMClient, model: Path, tmp_path: Path) -> None:
    policy = make_policy(model)
    others, ours = tmp_path / "others", tmp_path / "ours"
    theirs = publisher(client, others, policy)
    theirs.publish(0)
    (ours / "adapters").mkdir(parents=True)
    mine = publisher(client, ours, policy)
    mine.publish(0)
    mine.close()
    assert served(client) == [theirs.name_of(0)]


def test_a_server_without_a_keeper_that_forgot_an_adapter_counts_as_restarted(
    client: VLLMClient, model: Path, tmp_path: Path
) -> None:
    published = publisher(client, tmp_path, make_policy(model), served_config(rollout={"max_staleness": 3}))
    published.publish(0)
    published.recover()
    assert published.restarts == 0
    client.unload_adapter(published.name_of(0))
    published.recover()
    assert (published.restarts, served(client)) == (1, [published.name_of(0)])
    client.unload_adapter(published.name_of(0))
    published.publish(1)  # notices it as well
    assert published.restarts == 2
    assert set(served(client)) == {published.name_of(0), published.name_of(1)}
    published.close()


def test_a_canary_needs_something_to_predict(client: VLLMClient, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a token to predict"):
        AdapterPublisher(client, tmp_path, make_policy(model), [1], served_config())


def test_a_server_without_a_keeper_that_stays_away_is_lost(model: Path, tmp_path: Path) -> None:
    config = served_config(vllm={"startup_timeout": 1.0})
    with running_stub(tmp_path) as (url, _):
        client = VLLMClient(url, "theirs", timeout=0.5, attempts=1)
        published = publisher(client, tmp_path, make_policy(model), config)
    began = time.monotonic()
    with pytest.raises(ServerLost, match="no answer from the vLLM server"):
        published.recover()
    assert 1.0 <= time.monotonic() - began < 5.0
    published.close()


@pytest.fixture(scope="module")
def holder(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Kept]:
    """A kept stub with true weights; every restart of it takes seconds, so the tests share it."""
    folder = tmp_path_factory.mktemp("kept")
    config = served_config(
        stub_python(folder, folder / "faults.json"),
        vllm={"startup_timeout": 60.0, "health_interval": 0.2, "hang_timeout": 3.0, "max_restarts": 9},
        ebft={"max_completion_length": 32, "temperature": 1.0},
        rollout={"request_timeout": 30.0, "request_attempts": 2},
    )
    with kept(folder, config=config, model=model) as holder:
        holder.ready(seconds=60.0)
        yield holder


def later(seconds: float, action: Callable[[], None]) -> threading.Thread:
    thread = threading.Timer(seconds, action)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_restarted_server_gets_its_adapters_back(holder: Kept, model: Path, tmp_path: Path) -> None:
    client, policy = holder.connect(), make_policy(model)
    published = publisher(client, tmp_path, policy, holder.spec.config, server_folder=holder.folder)
    published.publish(6)
    generation = holder.state().generation
    holder.kill()
    published.recover()
    assert holder.state().generation == generation + 1
    assert published.restarts == 1
    assert client.score(CANARY, published.name_of(6)) == pytest.approx(truth(policy), abs=1e-4)
    published.recover()
    assert published.restarts == 1
    holder.kill()  # and a publication rides over a restart, too
    train(policy, 1)
    assert published.publish(7).canary < 1e-4
    assert published.restarts == 2
    assert served(client) == [published.name_of(7)]
    published.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "hung"])
def test_a_rollout_rides_over_a_restart(holder: Kept, model: Path, tmp_path: Path, how: str) -> None:
    client, policy = holder.connect(), make_policy(model)
    config = holder.spec.config
    published = publisher(client, tmp_path, policy, config, server_folder=holder.folder)
    published.publish(2)
    sampler = VLLMSampler(client, config, [256, 10, 20, 30], published)
    wanted = [request(row, [row, 5], length=16, given=[[7, 8]]) for row in range(5)]
    expected, seen = sampler.sample(wanted, seed=3, version=2), []
    inject(holder.faults, slow=0.03)

    def strike() -> None:
        if how == "killed":
            inject(holder.faults)
            holder.kill()
        else:
            inject(holder.faults, hang_engine=True)
            holder.until(lambda state: state.phase == "restarting", 30.0)
            inject(holder.faults)

    thread = later(0.7, strike)
    groups = sampler.sample(wanted, seed=3, version=2, on_group=seen.append)
    thread.join()
    assert published.restarts == 1
    assert [[s and s.token_ids for s in group.samples] for group in groups] == [
        [s and s.token_ids for s in group.samples] for group in expected
    ]
    assert sorted(group.row_id for group in seen) == list(range(5))
    published.close()


def test_the_adapter_of_the_files_is_the_policy(client: VLLMClient, model: Path, tmp_path: Path) -> None:
    """What is published is an ordinary PEFT folder: loaded onto a fresh base it is the policy."""
    policy = make_policy(model, seed=8)
    published = publisher(client, tmp_path, policy)
    published.publish(0)
    base = AutoModelForCausalLM.from_pretrained(model)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapters" / published.name_of(0)).eval()
    assert truth(loaded) == pytest.approx(truth(policy), abs=1e-5)
    published.close()
