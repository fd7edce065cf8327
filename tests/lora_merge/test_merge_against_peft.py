"""The oracle is PEFT: its `merge_and_unload` weight by weight, and its unmerged forward pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ebft_core.lora_merge import check_merge, merge_adapter
from lora_merge.builders import adapted, load, prompt, save_adapter, save_base

ARCHITECTURES = ["llama", "llama_tied", "qwen3", "gpt2", "gpt_neox"]
METHODS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "dora_rslora": {"use_dora": True, "use_rslora": True, "lora_alpha": 3},
    "bias": {"bias": "lora_only"},
}


def _merge(tmp_path: Path, base: Path, **options) -> Path:
    adapter = save_adapter(base, tmp_path / "adapter", **options)
    merge_adapter(base, adapter, tmp_path / "merged")
    return tmp_path / "merged"


def _assert_same_weights(tmp_path: Path, base: Path, merged: Path, atol: float = 1e-6) -> None:
    expected = adapted(base, tmp_path / "adapter").merge_and_unload().state_dict()
    actual = load(merged).state_dict()
    before = load(base).state_dict()
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, atol=atol, rtol=1e-5, msg=name)
    assert any(not torch.allclose(actual[name], before[name], atol=1e-3) for name in actual)


def _assert_same_logits(tmp_path: Path, base: Path, merged: Path) -> None:
    with torch.no_grad():
        expected = adapted(base, tmp_path / "adapter")(prompt()).logits
        actual = load(merged)(prompt()).logits
        untuned = load(base)(prompt()).logits
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)
    assert (expected - untuned).abs().max() > 1e-2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equals_peft(tmp_path: Path, architecture: str, method: str) -> None:
    base = save_base(tmp_path / "base", architecture)
    merged = _merge(tmp_path, base, **METHODS[method])
    _assert_same_weights(tmp_path, base, merged)
    _assert_same_logits(tmp_path, base, merged)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_rank_and_alpha_patterns(tmp_path: Path, architecture: str) -> None:
    base = save_base(tmp_path / "base", architecture)
    last = "c_proj" if architecture == "gpt2" else "down_proj"
    patterns = {"rank_pattern": {f"mlp.{last}": 2, r".*\.1\..*attn.*": 3}, "alpha_pattern": {last: 11.0}}
    merged = _merge(tmp_path, base, use_rslora=True, **patterns)
    _assert_same_weights(tmp_path, base, merged)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox"])
def test_embedding_updates(tmp_path: Path, architecture: str, dora: bool) -> None:
    base = save_base(tmp_path / "base", architecture)
    embedding = {"llama": "embed_tokens", "gpt2": "wpe", "gpt_neox": "embed_in"}[architecture]
    merged = _merge(tmp_path, base, target_modules=[embedding], use_dora=dora)
    _assert_same_weights(tmp_path, base, merged)
    _assert_same_logits(tmp_path, base, merged)


def test_modules_to_save(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama")
    options = {"target_modules": ["q_proj"], "modules_to_save": ["norm", "lm_head"]}
    merged = _merge(tmp_path, base, **options)
    _assert_same_weights(tmp_path, base, merged)
    _assert_same_logits(tmp_path, base, merged)


@pytest.mark.parametrize("architecture", ["llama_tied", "gpt2"])
@pytest.mark.parametrize("side", ["input", "head", "saved_input", "saved_head"])
def test_update_of_one_tied_module_unties(tmp_path: Path, architecture: str, side: str) -> None:
    """PEFT's forward pass leaves the other module as it was, so the merged model must too."""
    base = save_base(tmp_path / "base", architecture)
    names = {"input": "wte" if architecture == "gpt2" else "embed_tokens", "head": "lm_head"}
    name = names[side.removeprefix("saved_")]
    attention = ["c_attn"] if architecture == "gpt2" else ["q_proj"]
    if side.startswith("saved_"):
        options = {"target_modules": attention, "modules_to_save": [name]}
    else:
        options = {"target_modules": [name, *attention]}
    merged = _merge(tmp_path, base, **options)
    _assert_same_logits(tmp_path, base, merged)
    assert json.loads((merged / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ],
)
def test_update_of_both_tied_modules_keeps_them_tied(tmp_path: Path, options: dict) -> None:
    base = save_base(tmp_path / "base", "llama_tied")
    merged = _merge(tmp_path, base, ensure_weight_tying=True, **options)
    _assert_same_logits(tmp_path, base, merged)
    assert json.loads((merged / "config.json").read_text())["tie_word_embeddings"] is True
    with safe_open(merged / "model.safetensors", "pt") as weights:
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118


def test_bfloat16_is_rounded_once(tmp_path: Path) -> None:
    """Exact rule: float32 sum of the bfloat16 base and the float32 update, rounded once."""
    base = save_base(tmp_path / "base", "llama", dtype=torch.bfloat16)
    merged = _merge(tmp_path, base, use_rslora=True)
    exact = adapted(base, tmp_path / "adapter").merge_and_unload().state_dict()
    with safe_open(merged / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118
            stored = weights.get_tensor(name)
            assert stored.dtype == torch.bfloat16
            ulp = torch.finfo(torch.bfloat16).eps * exact[name].abs()
            assert ((stored.float() - exact[name]).abs() <= 0.5 * ulp + 1e-6).all(), name
    check = check_merge(base, tmp_path / "adapter", merged, prompts_ids=prompt().tolist())
    assert check.error < 0.1 * check.effect


def test_sharded_base(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", max_shard="8KB")
    merged = _merge(tmp_path, base)
    _assert_same_weights(tmp_path, base, merged)
    before = json.loads((base / "model.safetensors.index.json").read_text())
    after = json.loads((merged / "model.safetensors.index.json").read_text())
    assert len(set(after["weight_map"].values())) > 2
    assert after["weight_map"] == before["weight_map"]
    assert after["metadata"]["total_size"] == before["metadata"]["total_size"]


def test_sharded_tied_base_gets_its_head_into_the_index(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama_tied", max_shard="8KB")
    merged = _merge(tmp_path, base, target_modules=["lm_head"])
    _assert_same_logits(tmp_path, base, merged)
    index = json.loads((merged / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" in index["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in load(merged).state_dict().values())


def test_checkpoint_of_the_bare_decoder(tmp_path: Path) -> None:
    """GPT-2's hub checkpoint has no `transformer.` in its keys; transformers adds it when loading."""
    from safetensors.torch import load_file, save_file

    base = save_base(tmp_path / "base", "gpt2")
    weights = load_file(base / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    save_file(bare, base / "model.safetensors", metadata={"format": "pt"})
    merged = _merge(tmp_path, base)
    _assert_same_weights(tmp_path, base, merged)
