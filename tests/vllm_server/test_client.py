"""The client against the stub: what it sends and reads, and that every call ends."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ebft_core.vllm.client import RequestRefused, ServerGone, VLLMClient
from ebft_core.vllm.processes import free_port
from tests.vllm_server.builders import inject, running_stub
from tests.vllm_server.stub_models import MadeUpModel, log_softmax

COMPLETIONS, LOAD = "/v1/completions", "/v1/load_lora_adapter"
ORACLE = MadeUpModel({"vocab_size": 40})


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    with running_stub(tmp_path_factory.mktemp("stub")) as started:
        yield started


@pytest.fixture
def client(stub: tuple[str, Path]) -> Iterator[VLLMClient]:
    inject(stub[1])
    client = VLLMClient(stub[0], "theirs", timeout=5.0, attempts=3)
    yield client
    client.close()
    inject(stub[1])


@pytest.fixture
def faults(stub: tuple[str, Path]) -> Path:
    return stub[1]


def oracle_logprobs(prompt: list[int], completion: list[int], temperature: float) -> list[float]:
    """Softmax at the temperature, token by token."""
    tokens = prompt + completion
    rows = log_softmax(ORACLE.logits([tokens], None)[0] / temperature)
    return [float(rows[i - 1][tokens[i]]) for i in range(len(prompt), len(tokens))]


def test_completions_are_token_ids_with_the_log_probabilities_they_were_drawn_with(
    client: VLLMClient,
) -> None:
    completions = client.complete([3, 5], n=4, max_tokens=6, temperature=0.7, seed=1)
    assert len({tuple(c.token_ids) for c in completions}) > 1
    for completion in completions:
        assert len(completion.token_ids) == 6
        assert completion.finish_reason == "length"
        expected = oracle_logprobs([3, 5], completion.token_ids, 0.7)
        assert completion.logprobs == pytest.approx(expected, abs=1e-9)


def test_a_seed_repeats_the_completions(client: VLLMClient) -> None:
    first = client.complete([3], n=2, max_tokens=5, seed=9)
    assert client.complete([3], n=2, max_tokens=5, seed=9) == first
    assert client.complete([3], n=2, max_tokens=5, seed=10) != first


def test_a_stop_token_is_the_last_one_of_its_completion(client: VLLMClient) -> None:
    free = client.complete([7], n=1, max_tokens=6, seed=2)[0].token_ids
    stopped = client.complete([7], n=1, max_tokens=6, seed=2, stop_token_ids=[free[3]])[0]
    assert stopped.token_ids == free[: free.index(free[3]) + 1]
    assert stopped.finish_reason == "stop"


def test_top_k_top_p_min_p_and_penalty_reach_the_server(client: VLLMClient) -> None:
    def lead(token: int) -> float:
        best = np.sort(ORACLE.logits([[token]], None)[0, 0])
        return float(best[-1] - best[-2])

    clear = max(range(40), key=lead)  # a prompt whose most likely token is far ahead
    greedy = int(ORACLE.logits([[clear]], None)[0, 0].argmax())
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999}):
        completion = client.complete([clear], n=1, max_tokens=1, **options)[0]
        assert completion.token_ids == [greedy]
        assert completion.logprobs == [0.0]
    penalised = client.complete([greedy, clear], max_tokens=1, top_k=1, repetition_penalty=50.0)[0]
    assert penalised.token_ids != [greedy]


def test_scores_are_those_at_temperature_one(client: VLLMClient) -> None:
    tokens = [1, 8, 2, 30]
    assert client.score(tokens) == pytest.approx(oracle_logprobs(tokens[:1], tokens[1:], 1.0), abs=1e-9)


def test_models_name_the_base_and_the_adapters(client: VLLMClient, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')
    client.load_adapter("policy-v1", str(tmp_path))
    assert [(m.name, m.parent) for m in client.models()] == [("theirs", None), ("policy-v1", "theirs")]
    assert client.score([1, 2, 3], "policy-v1") != client.score([1, 2, 3])
    with pytest.raises(RequestRefused, match="already been loaded"):
        client.load_adapter("policy-v1", str(tmp_path))
    client.unload_adapter("policy-v1")
    with pytest.raises(RequestRefused, match="does not exist"):
        client.score([1, 2, 3], "policy-v1")
    with pytest.raises(RequestRefused, match="cannot be found"):
        client.unload_adapter("policy-v1")


def test_an_adapter_that_does_not_suit_is_refused_although_the_server_says_500(
    client: VLLMClient, faults: Path, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 16}')
    with pytest.raises(RequestRefused, match="greater than max_lora_rank 8"):
        client.load_adapter("wide", str(tmp_path))
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')
    inject(faults, refuse_lora="no such module")
    with pytest.raises(RequestRefused, match="no such module"):
        client.load_adapter("odd", str(tmp_path))
    inject(faults, fail={LOAD: {"kind": "500", "times": 3}, "/health": {"kind": "503", "times": 9}})
    with pytest.raises(ServerGone):  # a dead engine says 500, too
        client.load_adapter("policy-v3", str(tmp_path))


def test_an_adapter_whose_first_answer_was_lost_counts_as_loaded(
    client: VLLMClient, faults: Path, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')
    inject(faults, fail={LOAD: {"kind": "cut"}})  # loaded, and the answer cut off
    client.load_adapter("policy-v2", str(tmp_path))
    assert "policy-v2" in [model.name for model in client.models()]
    client.unload_adapter("policy-v2")


@pytest.mark.parametrize(
    ("prompt", "said"), [([1] * 96, "maximum context length"), ([400], "out of vocabulary")]
)
def test_what_the_server_refuses_is_asked_once_and_said_in_its_words(
    client: VLLMClient, prompt: list[int], said: str
) -> None:
    began = time.monotonic()
    with pytest.raises(RequestRefused, match=said) as caught:
        client.complete(prompt, max_tokens=4)
    assert caught.value.status == 400
    assert time.monotonic() - began < 0.25  # no pause, hence no second attempt


@pytest.mark.parametrize("kind", ["reset", "cut", "500", "503", "429"])
def test_passing_faults_are_retried(client: VLLMClient, faults: Path, kind: str) -> None:
    inject(faults, fail={COMPLETIONS: {"kind": kind, "times": 2}})
    assert len(client.complete([1], n=2, max_tokens=3)) == 2


@pytest.mark.parametrize("kind", ["reset", "cut", "500"])
def test_lasting_faults_end_after_the_attempts(client: VLLMClient, faults: Path, kind: str) -> None:
    inject(faults, fail={COMPLETIONS: {"kind": kind, "times": 3}})
    with pytest.raises(ServerGone, match=r"3 attempt\(s\)"):
        client.complete([1], max_tokens=3)
    assert client.complete([1], max_tokens=3)  # exactly three were used up


@pytest.mark.parametrize("fault", [{"hang": True}, {"fail": {COMPLETIONS: {"kind": "drip", "times": 9}}}])
def test_a_server_that_hangs_or_drips_ends_in_time(
    client: VLLMClient, faults: Path, fault: dict[str, object]
) -> None:
    inject(faults, **fault)
    began = time.monotonic()
    with pytest.raises(ServerGone):
        client.complete([1], n=4, max_tokens=3, timeout=0.5, attempts=2)
    assert 0.5 <= time.monotonic() - began < 2.5


def test_nobody_listening_is_gone_and_not_healthy() -> None:
    client = VLLMClient(f"http://127.0.0.1:{free_port()}", "x", timeout=1.0, attempts=2)
    with pytest.raises(ServerGone, match="refused"):
        client.models()
    assert not client.health()


def test_an_answer_that_is_no_vllm_is_refused(client: VLLMClient, faults: Path) -> None:
    inject(faults, fail={COMPLETIONS: {"kind": "garbage"}})
    with pytest.raises(RequestRefused, match="not JSON"):
        client.complete([1], max_tokens=1)


def test_many_threads_share_a_client(client: VLLMClient) -> None:
    def ask(seed: int) -> list[float]:
        return client.complete([seed % 40], max_tokens=3, seed=seed)[0].logprobs

    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(ask, range(96)))
    assert together[:5] == [ask(seed) for seed in range(5)]
    assert np.isfinite(together).all()


def test_health_and_progress_follow_the_work(client: VLLMClient) -> None:
    assert client.health()
    before = client.progress()
    assert client.progress() == before
    client.complete([1], max_tokens=2)
    assert client.progress() != before


def test_the_oracle_is_a_distribution() -> None:
    assert math.isclose(float(np.exp(log_softmax(ORACLE.logits([[3]], None)[0, 0])).sum()), 1.0)
