"""Frozen held-out rows: a folder that stays what it is, and only for models of its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset

from ebft_core.data.heldout import check_heldout, freeze_heldout, frozen_heldout
from ebft_core.data.store import read_rows
from ebft_core.errors import UserError
from ebft_core.models import load_tokenizer
from ebft_core.tokenizer import vocabulary_digest
from evaluation.builders import make_row, run_config, save_model, tiny_model


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_model(tiny_model(), tmp_path / "base")


@pytest.fixture
def tokenized(tmp_path: Path, base: Path) -> Path:
    """As stage `tokenize` leaves it."""
    folder = tmp_path / "tokenize"
    rows = [make_row([length], length) for length in (18, 25)]
    Dataset.from_list(rows).save_to_disk(str(folder / "heldout"))
    Dataset.from_list(rows).save_to_disk(str(folder / "train"))
    vocabulary = vocabulary_digest(load_tokenizer(base, run_config()))
    document = {"vocabulary": vocabulary, "documents": 9, "heldout": {"rows": 2}}
    (folder / "data.json").write_text(json.dumps(document))
    return folder


def _config(heldout: Path):
    config = run_config()
    return config.model_copy(
        update={"evaluate": config.evaluate.model_copy(update={"heldout": str(heldout)})}
    )


def test_frozen_rows_are_those_of_the_first_run(tmp_path: Path, base: Path, tokenized: Path) -> None:
    target = tmp_path / "kept" / "heldout"
    ref = freeze_heldout(tokenized, target)
    assert check_heldout(target) == ref
    assert sorted(path.name for path in target.iterdir()) == ["data.json", "heldout", "manifest.json"]
    folder = frozen_heldout(_config(target), load_tokenizer(base, run_config()))
    assert folder == target
    assert read_rows(folder / "heldout")["input_ids"] == read_rows(tokenized / "heldout")["input_ids"]
    # Whatever the data become: the folder is kept.
    Dataset.from_list([make_row([9], 9)]).save_to_disk(str(tokenized / "other"))
    (tokenized / "heldout").rename(tokenized / "before")
    (tokenized / "other").rename(tokenized / "heldout")
    assert freeze_heldout(tokenized, target) == ref


def test_a_changed_byte_is_noticed(tmp_path: Path, tokenized: Path) -> None:
    target = tmp_path / "kept"
    freeze_heldout(tokenized, target)
    file = next((target / "heldout").glob("*.arrow"))
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match="damaged"):
        check_heldout(target)


def test_rows_of_another_tokenizer_are_refused(tmp_path: Path, base: Path, tokenized: Path) -> None:
    target = tmp_path / "kept"
    freeze_heldout(tokenized, target)
    tokenizer = load_tokenizer(base, run_config())
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(UserError, match="another tokenizer"):
        frozen_heldout(_config(target), tokenizer)
    assert frozen_heldout(run_config(), tokenizer) is None
