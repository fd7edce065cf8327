"""Stage `prepare_base` on model folders, and what `base.json` says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ebft_core.base_model import (
    BaseModelInfo,
    digest_model_folder,
    embedding_size,
    read_base,
    write_base,
)
from ebft_core.errors import UserError
from ebft_core.stages import prepare_base
from tests.data.builders import byte_tokenizer, run_config, stage_context, tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model", byte_tokenizer())


def prepare(root: Path, **model: Any) -> Path:
    context = stage_context(root, run_config(["stdlib:abc.py"], model=model))
    prepare_base.run(context)
    return context.output


def test_a_local_folder_is_checked_and_digested(model: Path, tmp_path: Path) -> None:
    base = read_base(prepare(tmp_path / "run", name_or_path=str(model)))
    assert base == BaseModelInfo(model, digest_model_folder(model), str(model), None, {})
    assert embedding_size(base.path) == 258


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_any_changed_byte_changes_the_digest(model: Path, name: str) -> None:
    before = digest_model_folder(model)
    content = bytearray((model / name).read_bytes())
    content[-2] ^= 1
    (model / name).write_bytes(content)
    assert digest_model_folder(model) != before


def test_read_me_files_and_subfolders_do_not_count(model: Path) -> None:
    before = digest_model_folder(model)
    (model / "README.md").write_text("hello")
    (model / "onnx").mkdir()
    (model / "onnx" / "config.json").write_text("{}")
    assert digest_model_folder(model) == before
    (model / "chat_template.jinja").write_text("x")
    assert digest_model_folder(model) != before


def pickled_only(model: Path) -> None:
    (model / "model.safetensors").unlink()
    torch.save({}, model / "pytorch_model.bin")


def no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def lost_shard(model: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def no_config(model: Path) -> None:
    (model / "config.json").unlink()


def not_causal(model: Path) -> None:
    edit_config(model, architectures=["BertForSequenceClassification"])


def own_code(model: Path) -> None:
    edit_config(model, model_type="homemade", auto_map={"AutoConfig": "code.Config"})
    (model / "code.py").write_text("raise SystemExit('the code of the model was run')")


def small_embedding(model: Path) -> None:
    edit_config(model, vocab_size=257)


def no_tokenizer(model: Path) -> None:
    for path in model.glob("tokenizer*"):
        path.unlink()


def edit_config(model: Path, **fields: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **fields}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (pickled_only, "only pickled weights"),
        (no_weights, "no weights in this folder"),
        (lost_shard, "1 weight file"),
        (no_config, "no readable config.json"),
        (not_causal, "not a causal language model"),
        (own_code, "transformers cannot load"),
        (small_embedding, "beyond the model's embedding"),
        (no_tokenizer, "has no tokenizer"),
    ],
)
def test_folders_that_cannot_be_a_base_model(model: Path, tmp_path: Path, damage: Any, message: str) -> None:
    damage(model)
    with pytest.raises(UserError, match=message):
        prepare(tmp_path / "run", name_or_path=str(model))
    assert not list((tmp_path / "run" / "output").iterdir())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "no such folder"),
        ("some/model", "the hub cannot be reached"),
        ("not a/hub id/at all", "neither a folder nor a hub id"),
    ],
)
def test_names_that_lead_nowhere(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        prepare(tmp_path / "run", name_or_path=name, revision="main")
    assert caught.value.where == "model.name_or_path"


def test_a_hub_model_in_the_cache_is_resolved_to_its_commit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache layout is the hub client's own; offline, the client itself finds the snapshot in it."""
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--some--model"
    shutil.copytree(model, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    base = read_base(prepare(tmp_path / "run", name_or_path="some/model"))
    assert (base.source, base.revision, base.path.name) == ("some/model", commit, commit)


def test_a_model_inside_the_output_may_move_with_it(tmp_path: Path) -> None:
    (tmp_path / "a" / "model").mkdir(parents=True)
    write_base(tmp_path / "a", BaseModelInfo(tmp_path / "a" / "model", "d", "from_scratch"))
    (tmp_path / "a").rename(tmp_path / "b")
    assert read_base(tmp_path / "b").path == tmp_path / "b" / "model"
    (tmp_path / "b" / "model").rmdir()
    with pytest.raises(UserError, match="folder is gone"):
        read_base(tmp_path / "b")
