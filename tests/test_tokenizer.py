"""Tokenizers: made here, loaded from folders, refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from ebft_core.config import FromScratchConfig, ModelConfig
from ebft_core.data.reader import read_files
from ebft_core.data.sources import resolve_patterns
from ebft_core.errors import UserError
from ebft_core.scratch.tokenizer import _byte_characters, bpe_backend, make_tokenizer
from ebft_core.tokenizer import check_token_ids, load_tokenizer
from tests.data.builders import byte_tokenizer, word_tokenizer

ANY_TEXT = st.text(st.characters(codec="utf-8")) | st.sampled_from(["<|endoftext|>", "a<|pad|>b", "\x00\r\n"])
BYTE = byte_tokenizer()
LOCAL = ModelConfig(name_or_path="unused")


def stdlib_texts() -> list[str]:
    return [row.record["text"] for row in read_files(resolve_patterns(["stdlib:json/*.py"], where="x"))]


BPE = make_tokenizer(
    FromScratchConfig(sources=["stdlib:json/*.py"], tokenizer="bpe", vocab_size=500), stdlib_texts()
)


@given(ANY_TEXT)
def test_byte_tokens_are_the_bytes_and_decode_to_the_text(text: str) -> None:
    ids = BYTE(text, add_special_tokens=False).input_ids
    assert ids == list(text.encode())
    assert BYTE.decode(ids) == text


@given(ANY_TEXT)
def test_bpe_round_trips_any_text(text: str) -> None:
    assert BPE.decode(BPE(text, add_special_tokens=False).input_ids) == text


def test_bpe_was_trained_and_has_the_size_asked_for() -> None:
    assert len(BPE) == 500
    text = stdlib_texts()[0]
    assert len(BPE(text).input_ids) < 0.7 * len(text.encode())


def test_bpe_training_is_reproducible() -> None:
    assert bpe_backend(stdlib_texts(), 500).to_str() == bpe_backend(stdlib_texts(), 500).to_str()


def test_a_bpe_vocabulary_without_room_for_every_byte() -> None:
    with pytest.raises(UserError, match="cannot hold every byte") as caught:
        bpe_backend([], 200)
    assert caught.value.where == "model.from_scratch.vocab_size"


def test_the_byte_alphabet_is_the_one_of_byte_level_tokenizers() -> None:
    assert set(_byte_characters()) == set(pre_tokenizers.ByteLevel.alphabet())
    backend = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for byte in range(128):  # one-byte characters, through the library's own mapping
        assert backend.pre_tokenize_str(chr(byte))[0][0] == _byte_characters()[byte]


@pytest.mark.parametrize("tokenizer", [BYTE, BPE], ids=["byte", "bpe"])
def test_a_saved_tokenizer_loads_the_same(tokenizer: object, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    text = "def f():\n\treturn '<|endoftext|> é日'"
    for loaded in (load_tokenizer(tmp_path, LOCAL), AutoTokenizer.from_pretrained(tmp_path)):
        assert loaded(text).input_ids == tokenizer(text).input_ids
        assert loaded.decode(loaded(text).input_ids) == text
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            assert getattr(loaded, name) == getattr(tokenizer, name) is not None


def test_padding_falls_back_to_eos_and_not_to_nothing(tmp_path: Path) -> None:
    word_tokenizer(bos=False).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path, LOCAL).pad_token == "</s>"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="no padding token and no end-of-sequence token"):
        load_tokenizer(tmp_path, LOCAL)


def test_folders_without_a_usable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no tokenizer"):
        load_tokenizer(tmp_path, LOCAL)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="does not load"):
        load_tokenizer(tmp_path, LOCAL)


def test_the_configured_chat_template_replaces_the_tokenizers_own(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "own"
    tokenizer.save_pretrained(tmp_path / "m")
    (tmp_path / "t.jinja").write_text("other")
    assert load_tokenizer(tmp_path / "m", LOCAL).chat_template == "own"
    named = ModelConfig(name_or_path="unused", chat_template=str(tmp_path / "t.jinja"))
    assert load_tokenizer(tmp_path / "m", named).chat_template == "other"
    lost = ModelConfig(name_or_path="unused", chat_template=str(tmp_path / "none.jinja"))
    with pytest.raises(UserError, match="cannot read the chat template"):
        load_tokenizer(tmp_path / "m", lost)


def test_tokens_beyond_the_embedding_are_named() -> None:
    check_token_ids(BYTE, 258, where="x")
    with pytest.raises(UserError, match="1 token") as caught:
        check_token_ids(BYTE, 257, where="x")
    assert caught.value.value == "<|pad|> = 257"
