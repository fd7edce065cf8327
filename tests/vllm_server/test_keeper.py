"""The keeper with the stub: every way to start badly, to die, to hang and to be stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from ebft_core.errors import UserError
from ebft_core.events import read_events
from ebft_core.stop import StopSignal
from ebft_core.vllm import keeper as keeper_module
from ebft_core.vllm.processes import group_members
from ebft_core.vllm.server import StartFailed
from ebft_core.vllm.state import ServerLost, wait_ready, want_model
from tests.vllm_server.builders import (
    QUICK,
    inject,
    kept,
    made_up_model,
    processes_with,
    served_config,
    stub_python,
)


def messages(path: Path) -> list[str]:
    return [event["text"] for event in read_events(path) if event["kind"] == "message"]


def config_with(tmp_path: Path, **vllm: Any) -> Any:
    return served_config(stub_python(tmp_path, tmp_path / "faults.json"), vllm={**QUICK, **vllm})


def test_a_server_is_started_written_down_and_ended(tmp_path: Path) -> None:
    with kept(tmp_path) as holder:
        state = holder.ready()
        assert state.generation == 0
        assert state.model_name == f"ebft-{state.nonce}"
        assert state.model_digest == "digest"
        assert (state.max_lora_rank, state.max_model_len) == (8, 96)
        assert state.keeper_pid == os.getpid()
        assert state.keeper_alive
        assert state.server_pgid == state.server_pid
        assert holder.client().complete([1, 2], n=2, max_tokens=3)
        assert len(group_members(state.server_pgid)) == 3  # server, its helper, the guard
        assert wait_ready(holder.folder, timeout=1.0) == state
    assert holder.error is None
    assert holder.state().phase == "stopped"
    assert group_members(state.server_pgid) == []
    assert any("ready after" in text for text in messages(holder.events))


def test_a_slow_start_is_waited_for(tmp_path: Path) -> None:
    with kept(tmp_path, faults={"start_delay": 1.5}) as holder:
        assert holder.until(lambda s: s.server_pid is not None).phase == "starting"
        assert holder.ready().url


def test_a_start_that_takes_too_long_is_an_error_with_the_log(tmp_path: Path) -> None:
    config = config_with(tmp_path, startup_timeout=1.0)
    with kept(tmp_path, faults={"start_delay": 60}, config=config) as holder:
        holder.thread.join(10.0)
        assert isinstance(holder.error, StartFailed)
        said = holder.error.render()
        assert "did not start in time" in said
        assert "vllm.startup_timeout" in said
        assert "stub of a vLLM server" in said
        assert holder.state().phase == "failed"


def test_a_server_that_dies_at_once_is_an_error_with_the_log(tmp_path: Path) -> None:
    with kept(tmp_path, faults={"die_at_start": "no such kernel"}) as holder:
        holder.thread.join(10.0)
        assert isinstance(holder.error, StartFailed)
        assert "RuntimeError: no such kernel" in holder.error.render()
        assert "exit code 1" in holder.error.render()
        with pytest.raises(ServerLost, match="ended while it was starting"):
            wait_ready(holder.folder, timeout=1.0)


def test_a_server_that_listens_but_cannot_complete_is_an_error(tmp_path: Path) -> None:
    faults = {"fail": {"/v1/completions": {"kind": "500", "times": 99}}}
    with kept(tmp_path, faults=faults) as holder:
        holder.thread.join(20.0)
        assert isinstance(holder.error, StartFailed)
        assert "listens but does not work" in holder.error.render()
        assert "injected 500" in holder.error.render()


def test_somebody_elses_server_on_our_port_is_not_taken_for_ours(tmp_path: Path) -> None:
    with kept(tmp_path, faults={"model_name": "ebft-of-yesterday"}) as holder:
        holder.thread.join(10.0)
        assert isinstance(holder.error, UserError)
        assert "another server answers" in holder.error.render()
        assert "ebft-of-yesterday" in holder.error.render()


def test_a_port_that_is_taken_between_finding_and_binding_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        taken, free = squatter.getsockname()[1], keeper_module.free_port()
        ports = iter([taken, free])
        monkeypatch.setattr(keeper_module, "free_port", lambda: next(ports))
        with kept(tmp_path) as holder:
            assert holder.ready().url.endswith(f":{free}")


def test_a_taken_port_that_was_asked_for_is_an_error(tmp_path: Path) -> None:
    with socket.socket() as squatter, kept(tmp_path) as holder:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        holder.ready()
        keeper = keeper_module.Keeper(
            holder.spec, tmp_path / "other", events=keeper_module.EventWriter(None, "x"), stop=StopSignal()
        )
        with pytest.raises(UserError, match="port is taken") as caught:
            keeper.run(squatter.getsockname()[1])
        assert caught.value.where == "--port"


@pytest.mark.parametrize("victim", ["server", "group"])
def test_a_killed_server_is_restarted_on_its_port(tmp_path: Path, victim: str) -> None:
    with kept(tmp_path) as holder:
        first = holder.ready()
        assert first.server_pid is not None
        (os.kill if victim == "server" else os.killpg)(first.server_pid, signal.SIGKILL)
        second = holder.ready(1)
        assert second.generation == 1
        assert (second.url, second.model_name) == (first.url, first.model_name)
        assert second.server_pid != first.server_pid
        assert group_members(first.server_pid) == []  # its helper did not survive it
        assert holder.client().complete([1], max_tokens=1)
        assert any("died: it was killed by signal 9" in text for text in messages(holder.events))


@pytest.mark.parametrize("fault", ["hang", "hang_engine"])
def test_a_hung_server_is_found_and_restarted(tmp_path: Path, fault: str) -> None:
    with kept(tmp_path) as holder:
        first = holder.ready()
        began = time.monotonic()
        inject(holder.faults, only_start=0, **{fault: True})
        holder.until(lambda s: s.phase == "restarting")
        took = time.monotonic() - began
        assert took < QUICK["hang_timeout"] + QUICK["health_interval"] + 1.5
        assert holder.ready(1).url == first.url
        assert any("hangs: no progress" in text for text in messages(holder.events))


def test_a_stopped_process_is_found_as_hung_and_ended(tmp_path: Path) -> None:
    with kept(tmp_path) as holder:
        first = holder.ready()
        assert first.server_pid is not None
        os.killpg(first.server_pid, signal.SIGSTOP)
        assert holder.ready(1).server_pid != first.server_pid


def test_a_busy_server_is_not_taken_for_a_hung_one(tmp_path: Path) -> None:
    with kept(tmp_path) as holder:
        holder.ready()
        inject(holder.faults, slow=0.2)
        completion = holder.client(timeout=20.0).complete([1], max_tokens=30)[0]  # 6 s, the timeout is 1.5 s
        assert len(completion.token_ids) == 30
        assert holder.state().generation == 0


def test_restarts_are_counted_and_bounded(tmp_path: Path) -> None:
    with kept(tmp_path, config=config_with(tmp_path, max_restarts=2)) as holder:
        holder.ready()
        inject(holder.faults, die_at_start="out of memory")
        pid = holder.state().server_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        holder.thread.join(20.0)
        assert isinstance(holder.error, ServerLost)
        assert "`vllm.max_restarts`" in str(holder.error)
        assert "out of memory" in str(holder.error)
        counted = [text.rpartition("; ")[2] for text in messages(holder.events) if "; restart" in text]
        assert counted == ["restart 1 of 2", "restart 2 of 2"]
        state = holder.state()
        assert (state.phase, state.generation) == ("failed", 2)
        with pytest.raises(ServerLost, match="did not start again"):
            wait_ready(holder.folder, timeout=1.0)


def test_a_server_deaf_to_sigterm_is_killed(tmp_path: Path) -> None:
    with kept(tmp_path, faults={"ignore_sigterm": True}) as holder:
        holder.ready()
    assert holder.error is None
    assert processes_with(holder.spec.nonce) == []


def test_a_stop_during_the_start_ends_the_server_at_once(tmp_path: Path) -> None:
    with kept(tmp_path, faults={"start_delay": 60}) as holder:
        holder.until(lambda s: s.server_pid is not None)
        began = time.monotonic()
        holder.end()
        assert time.monotonic() - began < 5.0
        assert holder.error is None
        assert holder.state().phase == "stopped"


def test_other_weights_are_served_after_a_restart_that_is_no_failure(tmp_path: Path) -> None:
    with kept(tmp_path, config=config_with(tmp_path, max_restarts=0)) as holder:
        first = holder.ready()
        other = made_up_model(tmp_path, vocab_size=7)
        want_model(holder.folder, other, "digest of step 8")
        state = wait_ready(holder.folder, timeout=20.0, serving="digest of step 8")
        assert (state.generation, state.url, state.model) == (1, first.url, str(other))


def test_waiting_for_a_server_ends(tmp_path: Path) -> None:
    with pytest.raises(ServerLost, match=r"no server\.json"):
        wait_ready(tmp_path, timeout=0.1)
    with kept(tmp_path, faults={"start_delay": 60}) as holder:
        holder.until(lambda s: s.phase == "starting")
        with pytest.raises(ServerLost, match="not ready within"):
            wait_ready(holder.folder, timeout=0.3)


def test_the_state_is_json_with_the_documented_names(tmp_path: Path) -> None:
    with kept(tmp_path) as holder:
        holder.ready()
        document = json.loads((holder.folder / "server.json").read_text())
        assert {
            "url",
            "model_name",
            "nonce",
            "keeper_pid",
            "server_pid",
            "server_pgid",
            "start_ticks",
        } <= set(document)
        assert {"model_digest", "generation", "max_lora_rank", "log"} <= set(document)
