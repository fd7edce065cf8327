"""What `merge_adapter` must refuse, and that a refused or broken merge leaves nothing behind."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ebft_core.base_model import digest_model_folder
from ebft_core.errors import UserError
from ebft_core.lora_merge import check_merge, merge_adapter
from ebft_core.lora_merge import merge as merge_module
from lora_merge.builders import prompt, save_adapter, save_base


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_base(tmp_path / "base", "llama")


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    return save_adapter(base, tmp_path / "adapter")


def _edit_config(adapter: Path, **changes: object) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _edit_weights(adapter: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = adapter / "adapter_model.safetensors"
    weights = load_file(file)
    edit(weights)
    save_file(weights, file)


def _refused(base: Path, adapter: Path, message: str, **options: str) -> None:
    output = base.parent / "merged"
    with pytest.raises(UserError, match=message):
        merge_adapter(base, adapter, output, **options)
    assert sorted(path.name for path in base.parent.iterdir()) == sorted({base.name, adapter.name})


def test_recorded_digest_must_be_the_bases(base: Path, adapter: Path) -> None:
    (adapter / "ebft.json").write_text(json.dumps({"base_digest": digest_model_folder(base)}))
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-3
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    _refused(base, adapter, "trained on another base model")


def test_a_wrong_base_is_named_before_what_follows_from_it(base: Path, adapter: Path, tmp_path: Path) -> None:
    """The adapter's names fit no tensor of this base, but the reason is the base."""
    (adapter / "ebft.json").write_text(json.dumps({"base_digest": digest_model_folder(base)}))
    other = save_base(tmp_path / "other" / "base", "gpt2")
    with pytest.raises(UserError, match="trained on another base model"):
        merge_adapter(other, adapter, tmp_path / "merged")
    (adapter / "ebft.json").unlink()
    with pytest.raises(UserError, match="does not have"):
        merge_adapter(other, adapter, tmp_path / "merged")


def test_torch_gets_its_threads_back(base: Path, adapter: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        merge_adapter(base, adapter, tmp_path / "merged")
        with pytest.raises(UserError):
            merge_adapter(base, adapter, tmp_path / "again", expected_base_digest="0" * 64)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_matching_digest_is_recorded_in_the_report(base: Path, adapter: Path, tmp_path: Path) -> None:
    digest = digest_model_folder(base)
    (adapter / "ebft.json").write_text(json.dumps({"base_digest": digest}))
    report = merge_adapter(base, adapter, tmp_path / "merged", expected_base_digest=digest)
    assert report.digest_checked
    assert report.base_digest == digest
    assert report.merged_tensors == 14  # two layers of seven linear modules
    assert json.loads(json.dumps(report.to_json()))["shards"] == 1


def test_base_must_be_the_one_the_caller_expects(base: Path, adapter: Path) -> None:
    _refused(base, adapter, "base model has changed", expected_base_digest="0" * 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LOHA"}, "only LoRA"),
        ({"init_lora_weights": "pissa"}, "initialisation changes the base"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"use_dora": True}, "use_dora and the weights disagree"),
        ({"r": 3}, "does not fit its rank"),
    ],
)
def test_config_that_cannot_be_merged(base: Path, adapter: Path, changes: dict, message: str) -> None:
    _edit_config(adapter, **changes)
    _refused(base, adapter, message)


def test_weights_of_a_missing_module(base: Path, adapter: Path) -> None:
    def rename(weights: dict[str, torch.Tensor]) -> None:
        for key in [key for key in weights if "layers.1." in key]:
            weights[key.replace("layers.1.", "layers.9.")] = weights.pop(key)

    _edit_weights(adapter, rename)
    _refused(base, adapter, "a module that the base model does not have")


def test_saved_tensor_that_the_base_does_not_have(base: Path, adapter: Path) -> None:
    _edit_weights(adapter, lambda w: w.update({"base_model.model.model.extra.weight": torch.ones(3)}))
    _refused(base, adapter, "a tensor that the base model does not have")


def test_half_of_an_update(base: Path, adapter: Path) -> None:
    _edit_weights(adapter, lambda w: w.pop(next(key for key in w if key.endswith("lora_B.weight"))))
    _refused(base, adapter, "incomplete update")


def test_other_width(base: Path, adapter: Path, tmp_path: Path) -> None:
    def widen(weights: dict[str, torch.Tensor]) -> None:
        key = next(key for key in weights if key.endswith("q_proj.lora_A.weight"))
        weights[key] = torch.ones(4, 17)

    _edit_weights(adapter, widen)
    _refused(base, adapter, "does not fit the base model")


def test_diverged_adapter(base: Path, adapter: Path) -> None:
    _edit_weights(adapter, lambda w: next(iter(w.values())).fill_(float("nan")))
    _refused(base, adapter, "not finite")


def test_pickled_adapter(base: Path, adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    _refused(base, adapter, "pickled")


def test_pickled_base(base: Path, adapter: Path) -> None:
    (base / "model.safetensors").rename(base / "pytorch_model.bin")
    _refused(base, adapter, "pickled")


def test_quantised_base(base: Path, adapter: Path) -> None:
    weights = load_file(base / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"].to(torch.int8)
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    _refused(base, adapter, "number format")


def test_missing_shard_tensor(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", max_shard="8KB")
    adapter = save_adapter(base, tmp_path / "adapter")
    index = json.loads((base / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.norm.weight"]
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    _refused(base, adapter, "disagree with their index")


def test_failure_while_writing_leaves_nothing(
    base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merge_module, "write_shard", full_disk)
    with pytest.raises(OSError, match="No space left"):
        merge_adapter(base, adapter, base.parent / "merged")
    assert sorted(path.name for path in base.parent.iterdir()) == ["adapter", "base"]


def test_existing_output_is_kept(base: Path, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "precious").write_text("x")
    with pytest.raises(UserError, match="exists"):
        merge_adapter(base, adapter, tmp_path / "merged")
    assert (tmp_path / "merged" / "precious").read_text() == "x"


def test_other_files_are_copied_and_other_weights_left_out(base: Path, adapter: Path, tmp_path: Path) -> None:
    (base / "chat_template.jinja").write_text("{{ messages }}")
    (base / "pytorch_model.bin").write_bytes(b"stale")
    (base / "model-00001-of-00002.safetensors").write_bytes(b"stale")
    (base / "original").mkdir()
    (base / "original" / "params.json").write_text("{}")
    merge_adapter(base, adapter, tmp_path / "merged")
    found = sorted(str(path.relative_to(tmp_path / "merged")) for path in (tmp_path / "merged").rglob("*.*"))
    assert found == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "original/params.json",
        "tokenizer.json",
    ]


def test_progress_reaches_the_total(base: Path, adapter: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    merge_adapter(base, adapter, tmp_path / "merged", progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == ((base / "model.safetensors").stat().st_size,) * 2


def test_rounding_is_reported(tmp_path: Path) -> None:
    """An update far below bfloat16's resolution is mostly lost, and the report says so."""
    base = save_base(tmp_path / "base", "llama", dtype=torch.bfloat16)
    adapter = save_adapter(base, tmp_path / "adapter")
    fine = merge_adapter(base, adapter, tmp_path / "fine")
    _edit_weights(adapter, lambda w: [t.mul_(1e-3) for key, t in w.items() if "lora_B" in key])
    coarse = merge_adapter(base, adapter, tmp_path / "coarse")
    assert fine.lost_to_rounding < 0.1
    assert coarse.lost_to_rounding > 0.5
    assert coarse.update_norm == pytest.approx(fine.update_norm * 1e-3, rel=1e-4)


def test_check_fails_on_a_wrong_merge(base: Path, adapter: Path, tmp_path: Path) -> None:
    merge_adapter(base, adapter, tmp_path / "merged")
    good = check_merge(base, adapter, tmp_path / "merged", prompts_ids=prompt().tolist())
    assert good.error < 1e-5 < good.effect
    file = tmp_path / "merged" / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.mlp.up_proj.weight"] *= 1.01
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=re.escape("does not compute what base + adapter compute")):
        check_merge(base, adapter, tmp_path / "merged", prompts_ids=prompt().tolist())
