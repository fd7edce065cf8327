"""What is decided before a server starts: command line, environment, GPUs, interpreter, lengths, ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ebft_core.config import RunConfig
from ebft_core.errors import UserError
from ebft_core.vllm import spec as spec_module
from ebft_core.vllm.gpus import GpuPlan, assign_gpus, visible_gpus
from ebft_core.vllm.spec import find_python, lora_rank, make_spec
from tests.vllm_server.builders import made_up_model, served_config, stub_python


def spec_of(tmp_path: Path, visible: tuple[str, ...] = (), **sections: Any) -> Any:
    config = served_config(stub_python(tmp_path), **sections)
    model = made_up_model(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec_module, "visible_gpus", lambda: visible)
        return make_spec(config, model, "digest")


def option(command: list[str], name: str) -> str:
    assert command.count(name) == 1, command
    return command[command.index(name) + 1]


def test_the_command_line_says_what_the_run_file_says(tmp_path: Path) -> None:
    sections = {
        "lora": {"r": 20},
        "trainer": {"seed": 5},
        "vllm": {
            "dtype": "float32", "enable_prefix_caching": False, "enforce_eager": True,
            "tensor_parallel_size": 2, "data_parallel_size": 2, "gpu_memory_utilization": 0.7,
        },
    }  # fmt: skip
    spec = spec_of(tmp_path, ("0", "1", "2", "3", "4"), **sections)
    command = spec.command(8123)
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    expected = {
        "--host": "127.0.0.1", "--port": "8123", "--model": str(tmp_path / "made-up-model"),
        "--served-model-name": f"ebft-{spec.nonce}", "--dtype": "float32", "--max-model-len": "96",
        "--seed": "5", "--logprobs-mode": "processed_logprobs", "--generation-config": "vllm",
        "--tensor-parallel-size": "2", "--data-parallel-size": "2", "--max-lora-rank": "32",
        "--gpu-memory-utilization": "0.7",
    }  # fmt: skip
    assert {name: option(command, name) for name in expected} == expected
    assert {"--no-enable-prefix-caching", "--enforce-eager", "--enable-lora"} <= set(command)
    assert "--trust-remote-code" not in command
    environment = spec.environment()
    assert environment["CUDA_VISIBLE_DEVICES"] == "1,2,3,4"
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment


def test_on_a_cpu_and_without_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    spec = spec_of(tmp_path, lora=None, vllm={"cpu_kv_cache_gb": 3})
    command, environment = spec.command(1), spec.environment()
    assert not {"--enable-lora", "--max-lora-rank", "--gpu-memory-utilization"} & set(command)
    assert {"--enable-prefix-caching", "--no-enable-chunked-prefill"} <= set(command)
    assert int(option(command, "--max-num-batched-tokens")) >= spec.max_model_len
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in environment
    assert "PYTHONPATH" not in environment
    for name in ("DO_NOT_TRACK", "VLLM_NO_USAGE_STATS", "HF_HUB_OFFLINE"):
        assert environment[name] == "1"


def test_two_servers_never_share_a_nonce(tmp_path: Path) -> None:
    assert spec_of(tmp_path).nonce != spec_of(tmp_path).nonce


@pytest.mark.parametrize(("rank", "offered"), [(1, 1), (2, 8), (8, 8), (9, 16), (200, 256), (512, 512)])
def test_the_smallest_rank_on_offer_is_taken(rank: int, offered: int) -> None:
    assert lora_rank(served_config(lora={"r": rank})) == offered


def test_a_rank_that_is_too_small_is_refused_before_anything_starts() -> None:
    config = served_config(lora={"r": 16}, vllm={"max_lora_rank": 8})  # strided: the rules let it pass
    with pytest.raises(UserError, match="their rank is larger") as caught:
        lora_rank(config)
    assert caught.value.where == "vllm.max_lora_rank, lora.r"
    with pytest.raises(UserError, match="no adapter of this rank"):
        lora_rank(served_config(lora={"r": 600}))


def test_the_length_follows_the_model_unless_it_is_asked_for(tmp_path: Path) -> None:
    long = {"data": {"sequence_length": 600}}
    assert spec_of(tmp_path, **long).max_model_len == 512  # the model's positions
    assert spec_of(tmp_path, vllm={"max_model_len": 100}).max_model_len == 100
    with pytest.raises(UserError, match="fewer positions") as caught:
        spec_of(tmp_path, vllm={"max_model_len": 513})
    assert caught.value.where == "vllm.max_model_len"


def test_a_head_size_that_vllm_lacks_on_a_cpu_is_refused(tmp_path: Path) -> None:
    config = served_config(stub_python(tmp_path))
    model = made_up_model(tmp_path, num_attention_heads=4)  # heads of 16
    with pytest.raises(UserError, match="head size"):
        make_spec(config, model, "digest")


def config_for_gpus(**vllm: Any) -> RunConfig:
    trainer = vllm.pop("trainer", "auto")
    return served_config(vllm=vllm, trainer={"device": trainer})


@pytest.mark.parametrize(
    ("vllm", "visible", "plan"),
    [
        ({}, (), GpuPlan((), None)),
        ({}, ("0", "1"), GpuPlan(("1",), ("0",))),
        ({"tensor_parallel_size": 2}, ("0", "1", "2"), GpuPlan(("1", "2"), ("0",))),
        ({"gpus": [0]}, ("4", "7"), GpuPlan(("4",), ("7",))),
        ({"colocate": True, "gpu_memory_utilization": 0.4}, ("0",), GpuPlan(("0",), None)),
        ({"trainer": "cpu"}, ("0",), GpuPlan(("0",), None)),
    ],
)
def test_gpus_are_divided(vllm: dict[str, Any], visible: tuple[str, ...], plan: GpuPlan) -> None:
    assert assign_gpus(config_for_gpus(**vllm), visible) == plan
    if plan.trainer is not None:
        assert not set(plan.server) & set(plan.trainer)


@pytest.mark.parametrize(
    ("vllm", "visible", "where"),
    [
        ({"tensor_parallel_size": 4}, ("0", "1"), "vllm.tensor_parallel_size, vllm.data_parallel_size"),
        ({"data_parallel_size": 2}, (), "vllm.tensor_parallel_size, vllm.data_parallel_size"),
        ({"gpus": [0]}, (), "vllm.gpus"),
        ({"gpus": [2]}, ("0", "1"), "vllm.gpus"),
        ({}, ("0",), "vllm.tensor_parallel_size, vllm.colocate"),
        ({"tensor_parallel_size": 2}, ("0", "1"), "vllm.tensor_parallel_size, vllm.colocate"),
    ],
)
def test_impossible_divisions_are_refused(vllm: dict[str, Any], visible: tuple[str, ...], where: str) -> None:
    with pytest.raises(UserError) as caught:
        assign_gpus(config_for_gpus(**vllm), visible)
    assert caught.value.where == where


def fake_smi(folder: Path, gpus: int) -> None:
    lines = "".join(f"echo 'GPU {i}: Some GPU (UUID: GPU-{i})'\n" for i in range(gpus))
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{lines}")
    (folder / "nvidia-smi").chmod(0o755)


@pytest.mark.parametrize(
    ("gpus", "setting", "seen"),
    [
        (2, None, ("0", "1")),
        (4, "2,0", ("2", "0")),
        (4, "GPU-aa, GPU-bb", ("GPU-aa", "GPU-bb")),
        (4, "1,-1,3", ("1",)),
        (4, "", ()),
        (0, "0,1", ()),
    ],
)
def test_visible_gpus_are_those_cuda_would_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, setting: str | None, seen: tuple[str, ...]
) -> None:
    fake_smi(tmp_path, gpus)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if setting is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert visible_gpus() == seen


def test_a_missing_interpreter_names_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no environment with vLLM") as caught:
        find_python(str(tmp_path / "none" / "python"))
    assert "make setup-vllm" in str(caught.value.hint)
    assert caught.value.where == "vllm.python"


def test_an_interpreter_without_vllm_is_refused() -> None:
    with pytest.raises(UserError, match="this environment has no vLLM"):
        find_python(sys.executable)


def test_the_environment_of_the_start_folder_is_found_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / ".venv-vllm" / "bin"
    here.mkdir(parents=True)
    stub_python(tmp_path).rename(here / "python")
    monkeypatch.chdir(tmp_path)
    assert find_python(None) == here / "python"
