"""Loading policies: devices, precision, LoRA targets, frozen copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ebft_core.errors import UserError
from ebft_core.models import (
    check_trainable,
    empty_model,
    freeze_copy,
    load_policy,
    select_attention,
    select_device,
    select_precision,
)
from tests.trainer_fixtures import CPU, make_config, tiny_llama


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_lora_trains_adapters_only_and_starts_as_the_base(base: Path) -> None:
    policy = load_policy(base, make_config(lora={"r": 4}), dtype=torch.bfloat16)
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for name, p in policy.named_parameters() if name not in trained} == {torch.bfloat16}
    assert not any("lm_head" in name for name in trained)


def test_new_adapters_depend_on_the_seed_only(base: Path) -> None:
    def first(seed: int) -> torch.Tensor:
        torch.rand(seed * 7 + 3)  # another state of the global generator
        policy = load_policy(base, make_config(lora={"r": 4}, trainer={"seed": seed}))
        return next(p for n, p in policy.named_parameters() if "lora_A" in n).detach()

    assert torch.equal(first(1), first(1))
    assert not torch.equal(first(1), first(2))


@pytest.mark.parametrize("targets", [["no_such_module"], "nothing_.*"])
def test_lora_targets_that_match_nothing_are_named(base: Path, targets: list[str] | str) -> None:
    with pytest.raises(UserError) as caught:
        load_policy(base, make_config(lora={"target_modules": targets}))
    assert caught.value.where == "lora.target_modules"
    assert "q_proj" in caught.value.expected


def test_full_fine_tuning_keeps_float32_weights_and_a_frozen_copy(base: Path) -> None:
    policy = load_policy(base, make_config(), dtype=torch.bfloat16)
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in policy.parameters())
    frozen = freeze_copy(policy, torch.bfloat16, CPU)
    assert not any(p.requires_grad for p in frozen.parameters())
    with torch.no_grad():
        policy.lm_head.weight.add_(1.0)
    assert not torch.allclose(policy.lm_head.weight, frozen.lm_head.weight.float(), atol=0.5)


def test_choices_that_this_machine_cannot_serve_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    trainer = make_config(trainer={"device": "cuda"}).trainer
    with pytest.raises(UserError) as caught:
        select_device(trainer)
    assert caught.value.where == "trainer.device"
    flex = make_config(trainer={"attention": "flex", "device": "auto"}).trainer
    with pytest.raises(UserError) as caught:
        select_attention(flex, CPU)
    assert caught.value.where == "trainer.attention"
    automatic = make_config(trainer={"precision": "auto", "device": "auto"}).trainer
    assert select_device(automatic) == CPU
    assert select_precision(automatic, CPU) == torch.float32
    assert select_attention(automatic, CPU) == "sdpa"
    assert select_attention(automatic, torch.device("cuda")) == "flex"


def test_what_cannot_be_trained_is_found_on_a_model_without_weights() -> None:
    empty = empty_model(tiny_llama().config)
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    check_trainable(empty, make_config(lora={"r": 4}))
    check_trainable(empty, make_config())
    with pytest.raises(UserError) as caught:
        check_trainable(empty, make_config(lora={"target_modules": ["no_such_module"]}))
    assert caught.value.where == "lora.target_modules"
    with pytest.raises(UserError) as caught:
        check_trainable(empty, make_config(data={"sequence_length": 4096}))
    assert "2048 positions" in caught.value.what
    assert not any(
        "lora" in name for name, _ in empty.named_parameters()
    )  # the check leaves no adapters behind
