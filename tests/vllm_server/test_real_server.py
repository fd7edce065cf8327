"""The real vLLM server (`make setup-vllm`) with a tiny Llama: what the stub imitates, and ends of all kinds.

One server serves all tests of this file in their order; those that kill it stand last.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from ebft_core.base_model import digest_model_folder
from ebft_core.runs import RunPlan
from ebft_core.vllm.client import RequestRefused, ServerGone, VLLMClient
from ebft_core.vllm.processes import group_members
from ebft_core.vllm.state import ServerState, read_state, server_folder, wait_ready
from tasks import provision_vllm as provision
from tests.vllm_server.builders import REAL_PYTHON, REAL_SERVER, processes_with, true_model
from tests.vllm_server.runs import prepared_run
from tests.vllm_server.test_stub import truth

START_SECONDS = 240.0
DETECTED_SECONDS = 15.0
PROMPT = [5, 80, 200]

pytestmark = REAL_SERVER


class Real:
    """A planned run, its server's files, and the weights as transformers reads them."""

    def __init__(self, folder: Path) -> None:
        self.model, self.adapter = true_model(folder)
        self.plan: RunPlan = prepared_run(
            folder,
            self.model,
            REAL_PYTHON,
            vllm={
                "startup_timeout": START_SECONDS, "health_interval": 3.0, "hang_timeout": 10.0,
                "dtype": "float32", "enforce_eager": True,
            },
            ebft={"temperature": 0.6, "max_completion_length": 32},
        )[0]  # fmt: skip
        self.folder = server_folder(self.plan.run_dir)

    def client(self, **options: object) -> VLLMClient:
        state = self.state()
        return VLLMClient(state.url, state.model_name, **{"timeout": 60.0, "attempts": 2, **options})  # type: ignore[arg-type]

    def state(self) -> ServerState:
        state = read_state(self.folder)
        assert state is not None
        return state

    def truth(
        self, completion: list[int], *, temperature: float, tuned: bool, prompt: list[int]
    ) -> list[float]:
        model = AutoModelForCausalLM.from_pretrained(self.model).eval()
        if tuned:
            model = PeftModel.from_pretrained(model, self.adapter).eval()
        return truth(model, prompt, completion, temperature)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    real = Real(tmp_path_factory.mktemp("real"))
    provision.ensure_server(str(real.plan.run_dir))
    nonce = real.state().nonce
    yield real
    provision.end_server(str(real.plan.run_dir))
    assert nonce is not None
    assert processes_with(nonce) == []


def test_its_state_says_what_it_serves(real: Real) -> None:
    state = real.state()
    assert state.phase == "ready"
    assert state.model_digest == digest_model_folder(real.model)
    assert (state.max_lora_rank, state.max_model_len) == (8, 96)
    names = [(m.name, m.parent, m.max_model_len) for m in real.client().models()]
    assert names == [(state.model_name, None, 96)]
    assert real.client().health()


def test_completions_carry_the_log_probabilities_of_the_sampling_distribution(real: Real) -> None:
    completions = real.client().complete(PROMPT, n=4, max_tokens=8, temperature=0.6, seed=1)
    assert len({tuple(c.token_ids) for c in completions}) > 1
    for completion in completions:
        expected = real.truth(completion.token_ids, temperature=0.6, tuned=False, prompt=PROMPT)
        assert completion.logprobs == pytest.approx(expected, abs=2e-4)
        assert completion.finish_reason == "length"
    assert real.client().complete(PROMPT, n=4, max_tokens=8, temperature=0.6, seed=1) == completions


def test_only_the_given_stop_tokens_end_a_completion(real: Real) -> None:
    free = real.client().complete(PROMPT, max_tokens=8, seed=4)[0].token_ids
    stopped = real.client().complete(PROMPT, max_tokens=8, seed=4, stop_token_ids=[free[4]])[0]
    assert stopped.token_ids == free[: free.index(free[4]) + 1]
    assert stopped.finish_reason == "stop"


def test_truncated_sampling_is_normalised_over_what_is_left(real: Real) -> None:
    only = real.client().complete(PROMPT, max_tokens=3, temperature=0.6, top_k=1, seed=0)[0]
    assert only.logprobs == pytest.approx([0.0] * 3, abs=1e-6)
    nucleus = real.client().complete(
        PROMPT, n=8, max_tokens=1, temperature=0.6, top_p=0.5, min_p=0.01, seed=0
    )
    full = real.truth([nucleus[0].token_ids[0]], temperature=0.6, tuned=False, prompt=PROMPT)
    assert nucleus[0].logprobs[0] > full[0]


def test_an_adapter_is_loaded_scored_and_unloaded(real: Real) -> None:
    client = real.client()
    client.load_adapter("policy-v1", str(real.adapter))
    tokens = [*PROMPT, 7, 40, 41]
    for model, tuned in ((None, False), ("policy-v1", True)):
        expected = real.truth(tokens[1:], temperature=1.0, tuned=tuned, prompt=tokens[:1])
        assert client.score(tokens, model) == pytest.approx(expected, abs=2e-4)
    completion = client.complete(PROMPT, max_tokens=6, temperature=0.6, seed=2, model="policy-v1")[0]
    expected = real.truth(completion.token_ids, temperature=0.6, tuned=True, prompt=PROMPT)
    assert completion.logprobs == pytest.approx(expected, abs=2e-4)
    with pytest.raises(RequestRefused, match="already been loaded"):
        client.load_adapter("policy-v1", str(real.adapter))
    client.unload_adapter("policy-v1")
    with pytest.raises(RequestRefused, match="does not exist"):
        client.score(tokens, "policy-v1")


def test_what_cannot_be_served_is_refused_in_words(real: Real, tmp_path: Path) -> None:
    client = real.client()
    with pytest.raises(RequestRefused, match="maximum context length"):
        client.complete([1] * 97, max_tokens=1)
    with pytest.raises(RequestRefused, match="out of vocabulary"):
        client.complete([999], max_tokens=1)
    with pytest.raises(RequestRefused, match="No adapter found"):
        client.load_adapter("none", str(tmp_path))
    (tmp_path / "wide").mkdir()
    _, wide = true_model(tmp_path / "wide", lora_rank=16)
    with pytest.raises(RequestRefused, match="max_lora_rank"):
        client.load_adapter("wide", str(wide))
    assert client.complete(PROMPT, max_tokens=1)  # none of it did any harm


def test_counters_move_with_the_work(real: Real) -> None:
    before = real.client().progress()
    assert "vllm:generation_tokens_total" in before
    real.client().complete(PROMPT, max_tokens=2)
    assert real.client().progress() != before


def test_a_killed_engine_is_noticed_and_the_server_restarted(real: Real) -> None:
    before = real.state()
    real.client().load_adapter("policy-v2", str(real.adapter))
    began = time.monotonic()
    os.kill(_engine(before), signal.SIGKILL)
    _until_restarting(real, before.generation, began)
    after = wait_ready(real.folder, timeout=START_SECONDS, generation=before.generation + 1)
    assert (after.url, after.model_name) == (before.url, before.model_name)
    with pytest.raises(RequestRefused, match="does not exist"):  # it has to be loaded again
        real.client().score(PROMPT, "policy-v2")
    real.client().load_adapter("policy-v2", str(real.adapter))
    assert real.client().complete(PROMPT, max_tokens=2, model="policy-v2")


def test_a_hung_engine_is_noticed_and_the_server_restarted(real: Real) -> None:
    before = real.state()
    began = time.monotonic()
    os.kill(_engine(before), signal.SIGSTOP)
    with pytest.raises(ServerGone):
        real.client(timeout=4.0, attempts=1).complete(PROMPT, max_tokens=1)
    _until_restarting(real, before.generation, began)
    after = wait_ready(real.folder, timeout=START_SECONDS, generation=before.generation + 1)
    assert after.url == before.url
    assert before.server_pgid is not None
    assert group_members(before.server_pgid) == []
    assert real.client().complete(PROMPT, max_tokens=1)


def test_a_killed_keeper_leaves_no_process_even_while_the_server_starts(tmp_path: Path) -> None:
    real = Real(tmp_path)
    command = [sys.executable, "-m", "ebft_core.cli", "serve-vllm", "--run-dir", str(real.plan.run_dir)]
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 60.0
    while (state := read_state(real.folder)) is None or state.server_pid is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(6.0)  # in the middle of its imports
    assert state.nonce is not None
    assert processes_with(state.nonce)
    keeper.kill()
    keeper.communicate()
    deadline = time.monotonic() + 10.0
    while processes_with(state.nonce) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_with(state.nonce) == []


def _engine(state: ServerState) -> int:
    """The process that computes: the one whose title says so."""
    assert state.server_pgid is not None
    for pid in group_members(state.server_pgid):
        if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    raise AssertionError("no engine")


def _until_restarting(real: Real, generation: int, began: float) -> None:
    while real.state().generation == generation:
        assert time.monotonic() - began < DETECTED_SECONDS
        time.sleep(0.05)


def test_torch_is_one_for_both() -> None:
    """The environments are pinned to the same torch, so that log-probabilities can be compared closely."""
    theirs = subprocess.run(
        [str(REAL_PYTHON), "-c", "import torch; print(torch.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert theirs.split("+")[0].split(".")[:2] == torch.__version__.split("+")[0].split(".")[:2]
