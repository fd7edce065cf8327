"""The sampler by HTTP against the stub server: exact log-probabilities, turns, and faults of all kinds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ebft_core.samplers.prompts import Group, PromptRequest, Sample
from ebft_core.samplers.vllm import VLLMSampler
from ebft_core.vllm.client import Completion, ServerGone, VLLMClient
from ebft_core.vllm.processes import free_port
from tests.samplers.builders import NEVER, request, sampling_config
from tests.vllm_server.builders import inject, running_stub
from tests.vllm_server.stub_models import MadeUpModel, processed

VOCAB, COMPLETIONS = 40, "/v1/completions"
ORACLE = MadeUpModel({"vocab_size": VOCAB})


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    with running_stub(tmp_path_factory.mktemp("stub")) as started:
        yield started


@pytest.fixture
def faults(stub: tuple[str, Path]) -> Iterator[Path]:
    inject(stub[1])
    yield stub[1]
    inject(stub[1])


class Weights:
    """A server whose only weights are the base model's; `mend` is what a recovery does."""

    def __init__(self, name: str = "theirs", mend: Callable[[], None] | None = None) -> None:
        self.name, self.mend = name, mend
        self.restarts = self.calls = 0

    def name_of(self, version: int) -> str:
        return self.name

    def recover(self) -> None:
        self.calls += 1
        if self.mend is not None:
            self.mend()
            self.restarts += 1


def sampler(
    url: str, *, weights: Weights | None = None, stops: tuple[int, ...] = (NEVER,), attempts: int = 1,
    timeout: float = 10.0, **ebft: Any,
) -> VLLMSampler:  # fmt: skip
    client = VLLMClient(url, "theirs", timeout=timeout, attempts=attempts)
    return VLLMSampler(client, sampling_config(**ebft), stops, weights or Weights())


def run(url: str, wanted: list[PromptRequest], *, seed: int = 1, **options: Any) -> list[Group]:
    return sampler(url, **options).sample(wanted, seed=seed, version=0)


def samples(group: Group) -> list[Sample]:
    found = [sample for sample in group.samples if sample is not None]
    assert len(found) == len(group.samples)
    return found


def check_logprobs(asked: PromptRequest, sample: Sample, body: dict[str, float]) -> None:
    assert sample.logprobs is not None
    history = asked.prompt_ids + sample.token_ids
    for s, (token, action) in enumerate(zip(sample.token_ids, sample.action, strict=True)):
        before = history[: len(asked.prompt_ids) + s]
        logits = ORACLE.logits([before], None)[0, -1]
        exact = processed(logits, before, body)[token] if action else 0.0
        assert sample.logprobs[s] == pytest.approx(exact, abs=1e-9)


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 0.7},
        {"temperature": 1.2, "top_p": 0.8, "top_k": 12, "min_p": 0.02, "repetition_penalty": 1.3},
    ],
)
def test_tokens_come_with_the_log_probabilities_they_were_drawn_with(
    stub: tuple[str, Path], faults: Path, body: dict[str, float]
) -> None:
    wanted = [request(row, [row, 5], length=3 + row) for row in range(6)]
    groups = run(stub[0], wanted, n_samples_per_prompt=3, **body)
    assert [group.row_id for group in groups] == list(range(6))
    for asked, group in zip(wanted, groups, strict=True):
        assert len({tuple(sample.token_ids) for sample in samples(group)}) > 1
        for sample in samples(group):
            assert len(sample.token_ids) == asked.max_new_tokens
            assert (sample.action, sample.truncated) == ([True] * asked.max_new_tokens, True)
            check_logprobs(asked, sample, body)


def test_turns_go_on_behind_given_tokens_on_their_own_history(stub: tuple[str, Path], faults: Path) -> None:
    given, stops = [[1, 2, 3], [6]], (4, 9, 17, 22, 30, 35)
    wanted = [request(row, [row], length=20, given=given) for row in range(5)]
    groups = run(stub[0], wanted, stops=stops, n_samples_per_prompt=4, temperature=1.0)
    finished = cut = 0
    for asked, group in zip(wanted, groups, strict=True):
        for sample in samples(group):
            check_logprobs(asked, sample, {"temperature": 1.0})
            ends = [s for s, token in enumerate(sample.token_ids) if token in stops and sample.action[s]]
            for s, ids in zip(ends, given, strict=False):
                behind = sample.token_ids[s + 1 : s + 1 + len(ids)]
                assert behind == ids or (sample.truncated and s == len(sample.token_ids) - 1)
            inserted = [t for t, action in zip(sample.token_ids, sample.action, strict=True) if not action]
            assert inserted in ([], [1, 2, 3], [1, 2, 3, 6])
            assert len(sample.token_ids) <= 20
            assert sample.truncated == (len(ends) < 3)
            finished += not sample.truncated
            cut += sample.truncated
    assert finished
    assert cut


def test_later_turns_are_drawn_independently(stub: tuple[str, Path], faults: Path) -> None:
    """Turns of one token behind the same given token have one distribution; their tokens still differ."""
    wanted = [request(0, [3], given=[[1], [1]])]
    options: dict[str, Any] = {"stops": tuple(range(VOCAB)), "temperature": 2.0, "n_samples_per_prompt": 16}
    found = [sample.token_ids for sample in samples(run(stub[0], wanted, **options)[0])]
    second, third = [tokens[2] for tokens in found], [tokens[4] for tokens in found]
    assert len(set(second)) > 3
    assert sum(a != b for a, b in zip(second, third, strict=True)) > 3


def test_a_completion_that_fills_the_servers_context_is_truncated(
    stub: tuple[str, Path], faults: Path
) -> None:
    (group,) = run(stub[0], [request(0, [3] * 90, length=30, given=[[1]])])  # 96 tokens is all it takes
    assert [(len(sample.token_ids), sample.truncated) for sample in samples(group)] == [(6, True)] * 4


def test_a_rerun_samples_alike_in_any_company(stub: tuple[str, Path], faults: Path) -> None:
    wanted = [request(row, [row], length=12, given=[[1, 2]]) for row in range(6)]
    options: dict[str, Any] = {"stops": (4, 9, 17), "n_samples_per_prompt": 3}
    whole = run(stub[0], wanted, **options)
    assert run(stub[0], wanted, **options) == whole
    assert run(stub[0], [wanted[i] for i in (4, 1)], **options) == [whole[4], whole[1]]
    assert run(stub[0], wanted, seed=2, **options) != whole


def test_groups_are_handed_over_as_they_finish_in_the_callers_thread(
    stub: tuple[str, Path], faults: Path
) -> None:
    inject(faults, slow=0.05)  # the stub answers one request at a time
    seen: list[tuple[float, int, threading.Thread]] = []

    def look(group: Group) -> None:
        seen.append((time.monotonic(), group.row_id, threading.current_thread()))

    groups = sampler(stub[0]).sample(
        [request(row, [row], length=3) for row in range(4)], seed=1, version=0, on_group=look
    )
    assert sorted(row for _, row, _ in seen) == [group.row_id for group in groups] == [0, 1, 2, 3]
    assert {thread for _, _, thread in seen} == {threading.current_thread()}
    assert seen[-1][0] - seen[0][0] > 0.1


def test_a_refused_prompt_costs_its_own_group_and_says_why(stub: tuple[str, Path], faults: Path) -> None:
    weights = Weights()
    wanted = [request(0, [1]), request(1, [VOCAB + 9]), request(2, [2])]
    groups = run(stub[0], wanted, weights=weights, n_samples_per_prompt=3)
    assert groups[1].samples == [None] * 3
    assert "out of vocabulary" in str(groups[1].problem)
    assert len(samples(groups[0])) == len(samples(groups[2])) == 3
    assert weights.calls == 0  # the server is there


def test_a_failing_turn_costs_its_own_sample(stub: tuple[str, Path], faults: Path) -> None:
    """The given tokens are refused, so only samples that reach the second turn fail."""
    wanted = [request(0, [3], length=6, given=[[VOCAB + 9]])]
    (group,) = run(stub[0], wanted, stops=(4, 9, 17, 22, 30, 35), n_samples_per_prompt=12, temperature=1.0)
    kept = [sample for sample in group.samples if sample is not None]
    assert 0 < len(kept) < 12
    assert all(sample.truncated for sample in kept)


@pytest.mark.parametrize("kind", ["reset", "cut", "500", "503"])
def test_passing_faults_are_retried(stub: tuple[str, Path], faults: Path, kind: str) -> None:
    wanted = [request(row, [row]) for row in range(3)]
    expected = run(stub[0], wanted)
    inject(faults, fail={COMPLETIONS: {"kind": kind, "times": 2}})
    assert run(stub[0], wanted, attempts=4) == expected


@pytest.mark.parametrize("kind", ["reset", "500"])
def test_one_request_that_gets_no_answer_costs_one_group(
    stub: tuple[str, Path], faults: Path, kind: str
) -> None:
    wanted, weights = [request(row, [row]) for row in range(4)], Weights()
    expected = run(stub[0], wanted)
    inject(faults, fail={COMPLETIONS: {"kind": kind, "times": 1}})
    groups = run(stub[0], wanted, weights=weights)
    failed = [group for group in groups if group.problem is not None]
    assert [group.samples for group in failed] == [[None] * 4]
    assert [group for group in groups if group.problem is None] == [
        group for group in expected if group.row_id != failed[0].row_id
    ]
    assert weights.calls == 1


@pytest.mark.parametrize("fault", [{"hang": True}, {"fail": {COMPLETIONS: {"kind": "500", "times": 99}}}])
def test_a_server_that_answers_nobody_is_gone_in_time(
    stub: tuple[str, Path], faults: Path, fault: dict[str, Any]
) -> None:
    inject(faults, **fault)
    began, seen = time.monotonic(), []
    with pytest.raises(ServerGone, match=COMPLETIONS):
        sampler(stub[0], timeout=0.5, attempts=2).sample(
            [request(row, [row]) for row in range(8)], seed=1, version=0, on_group=seen.append
        )
    assert time.monotonic() - began < 4.0
    assert seen == []


def test_nobody_listening_is_gone() -> None:
    with pytest.raises(ServerGone, match="refused"):
        run(f"http://127.0.0.1:{free_port()}", [request(0, [1])])


def test_what_a_restart_took_along_is_written_again_and_handed_over_once(
    stub: tuple[str, Path], faults: Path
) -> None:
    wanted = [request(row, [row], length=12, given=[[1, 2]]) for row in range(6)]
    options: dict[str, Any] = {"stops": (4, 9, 17)}
    expected, seen = run(stub[0], wanted, **options), []
    inject(faults, fail={COMPLETIONS: {"kind": "reset", "times": 5}})
    weights = Weights(mend=lambda: inject(faults))
    groups = sampler(stub[0], weights=weights, **options).sample(
        wanted, seed=1, version=0, on_group=seen.append
    )
    assert groups == expected
    assert sorted(group.row_id for group in seen) == list(range(6))
    assert weights.restarts == 1


def test_a_server_that_forgot_the_adapter_gets_it_back(
    stub: tuple[str, Path], faults: Path, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')
    client = VLLMClient(stub[0], "theirs")
    weights = Weights("policy-v3", mend=lambda: client.load_adapter("policy-v3", str(tmp_path)))
    groups = run(stub[0], [request(0, [1]), request(1, [2])], weights=weights)
    assert weights.restarts == 1
    assert [len(samples(group)) for group in groups] == [4, 4]
    client.unload_adapter("policy-v3")


@pytest.mark.parametrize(
    ("completion", "said"),
    [
        (Completion([], [], "stop"), "0 tokens came"),
        (Completion([1] * 7, [-1.0] * 7, "length"), "7 tokens came, 6 were asked for"),
        (Completion([1], [-1.0], "abort"), "finish_reason 'abort'"),
        (Completion([1, 2], [-1.0] * 2, "stop"), "finish_reason is 'stop', the last token 2"),
        (Completion([1, 9], [-1.0] * 2, "length"), "finish_reason is 'length', the last token 9"),
    ],
)
def test_an_answer_that_is_no_completion_is_not_used(
    completion: Completion, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = VLLMClient("http://127.0.0.1:1", "theirs")
    good = Completion([1, 9], [-1.0, -2.0], "stop")
    monkeypatch.setattr(client, "complete", lambda prompt, n, **rest: [good, completion][:n])
    config = sampling_config(n_samples_per_prompt=2, advantage_estimator="group_norm")
    (group,) = VLLMSampler(client, config, (9,), Weights()).sample([request(0, [1])], seed=0, version=0)
    assert group.samples == [None, None]
    assert said in str(group.problem)


def test_a_caller_that_stops_leaves_no_thread_at_work(
    stub: tuple[str, Path], faults: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that wait for a thread are not sent any more; threads do not keep the process alive."""
    monkeypatch.setattr("ebft_core.samplers.vllm.MAX_REQUESTS", 1)
    inject(faults, slow=0.05)  # twelve requests of ten tokens would take six seconds

    def stop(group: Group) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        sampler(stub[0]).sample(
            [request(row, [row], length=10) for row in range(12)], seed=1, version=0, on_group=stop
        )
    left = [thread for thread in threading.enumerate() if thread.name.startswith("request-")]
    assert all(thread.daemon for thread in left)
    for thread in left:
        thread.join(2.5)
        assert not thread.is_alive()
    assert caught.tb is not None  # its frames were alive until here, and with them what they hold


def test_errors_that_are_no_answers_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    client = VLLMClient("http://127.0.0.1:1", "theirs")

    def broken(prompt: list[int], **options: Any) -> list[Completion]:
        raise KeyError("a bug")

    monkeypatch.setattr(client, "complete", broken)
    with pytest.raises(KeyError, match="a bug"):
        VLLMSampler(client, sampling_config(), (9,), Weights()).sample([request(0, [1])], seed=0, version=0)
