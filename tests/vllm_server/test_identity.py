"""A server that the user runs: what is found out about it before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ebft_core.errors import UserError
from ebft_core.vllm.client import VLLMClient
from ebft_core.vllm.identity import check_foreign
from ebft_core.vllm.processes import free_port
from tests.vllm_server.builders import inject, running_stub, served_config


def config_for(url: str, **sections: Any) -> Any:
    return served_config(**{**sections, "vllm": {"url": url, "python": None}})


def test_a_suitable_server_is_taken_with_the_name_it_serves(tmp_path: Path) -> None:
    with running_stub(tmp_path) as (url, _):
        state = check_foreign(config_for(f"{url}/"))
        assert (state.url, state.model_name, state.phase) == (url, "theirs", "ready")
        assert state.max_model_len == 96
        assert not state.kept
        assert VLLMClient(state.url, state.model_name).complete([1], max_tokens=1)


def test_a_server_without_the_switch_for_adapters_is_refused(tmp_path: Path) -> None:
    with running_stub(tmp_path, lora=False) as (url, _):
        with pytest.raises(UserError, match="does not take adapters") as caught:
            check_foreign(config_for(url))
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in str(caught.value.expected)
        assert check_foreign(config_for(url, lora=None)).model_name == "theirs"  # nobody needs the switch


def test_a_server_with_too_short_a_context_is_refused(tmp_path: Path) -> None:
    with running_stub(tmp_path) as (url, _), pytest.raises(UserError, match="context is too short"):
        check_foreign(config_for(url, ebft={"max_completion_length": 96}))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"fail": {"/v1/models": {"kind": "garbage", "times": 9}}}, "does not do what a vLLM server does"),
        ({"fail": {"/v1/models": {"kind": "404", "times": 9}}}, "does not do what a vLLM server does"),
        ({"fail": {"/v1/completions": {"kind": "500", "times": 9}}}, "no answer from the vLLM server"),
    ],
)
def test_what_is_no_working_vllm_is_refused(tmp_path: Path, fault: dict[str, Any], said: str) -> None:
    with running_stub(tmp_path) as (url, faults):
        inject(faults, **fault)
        with pytest.raises(UserError, match=said) as caught:
            check_foreign(config_for(url))
        assert caught.value.where == "vllm.url"


def test_a_key_that_is_missing_is_named(tmp_path: Path) -> None:
    with running_stub(tmp_path) as (url, faults):
        inject(faults, fail={"/v1/models": {"kind": "401"}})
        with pytest.raises(UserError) as caught:
            check_foreign(config_for(url))
        assert "VLLM_API_KEY" in str(caught.value.hint)


def test_nobody_at_the_address() -> None:
    with pytest.raises(UserError, match="no answer from the vLLM server"):
        check_foreign(config_for(f"http://127.0.0.1:{free_port()}"))
