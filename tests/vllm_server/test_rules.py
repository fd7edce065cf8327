"""Rules about the server that the run file alone can break."""

from __future__ import annotations

from typing import Any

import pytest

from ebft_core.config.rules import broken_rules
from ebft_core.errors import UserError
from tests.vllm_server.builders import served_config


@pytest.mark.parametrize(
    ("sections", "keys", "what"),
    [
        ({"vllm": {"url": "localhost:8000"}}, ("vllm.url",), "not the address of a server"),
        ({"vllm": {"url": "http://h:1", "gpus": [0]}}, ("vllm.gpus", "vllm.url"), "run by you"),
        ({"vllm": {"url": "http://h:1", "python": "p"}}, ("vllm.python", "vllm.url"), "run by you"),
        ({"vllm": {"gpus": [0, 1]}}, ("vllm.gpus",), "does not fit"),
        ({"vllm": {"gpus": [1, 1], "tensor_parallel_size": 2}}, ("vllm.gpus",), "does not fit"),
        (
            {"vllm": {"colocate": True}},
            ("vllm.gpu_memory_utilization", "vllm.colocate"),
            "leaves the trainer",
        ),
        ({"vllm": {"max_lora_rank": 10}}, ("vllm.max_lora_rank",), "cannot be started for this"),
        (
            {"vllm": {"hang_timeout": 3.0, "health_interval": 3.0}},
            ("vllm.hang_timeout",),
            "before anybody looked",
        ),
        ({"vllm": {"max_model_len": 32}}, ("vllm.max_model_len",), "no room for a prompt"),
    ],
)
def test_a_broken_rule_names_its_keys(sections: dict[str, Any], keys: tuple[str, ...], what: str) -> None:
    with pytest.raises(UserError) as caught:
        served_config(**sections)
    assert what in caught.value.render()
    for key in keys:
        assert key in caught.value.render()


@pytest.mark.parametrize(
    ("sections", "what"),
    [
        ({"lora": {"r": 16}, "vllm": {"max_lora_rank": 8}}, "their rank is larger"),
        ({"lora": {"r": 513}}, "no adapter of this rank"),
        ({"lora": {"use_dora": True}}, "DoRA"),
    ],
)
def test_adapters_must_fit_a_server_that_is_used(sections: dict[str, Any], what: str) -> None:
    config = served_config(**sections)
    assert not [p for p in broken_rules(config) if what in p.what]  # strided mode has no server
    ebft = config.ebft.model_copy(update={"mode": "structured"})
    structured = config.model_copy(update={"ebft": ebft})
    assert [p for p in broken_rules(structured) if what in p.what]
