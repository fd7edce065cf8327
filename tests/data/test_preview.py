"""The preview shows the rows the trainer will see."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from ebft_core.data.packing import Piece, join
from ebft_core.data.preview import mark_row, preview
from ebft_core.data.transforms import get_transform
from tests.data.builders import byte_tokenizer, run_config, write_jsonl

SCRATCH = {"from_scratch": {"sources": ["stdlib:abc.py"]}}


def shown(config: object, rows: int = 3) -> str:
    out = io.StringIO()
    preview(config, rows=rows, console=Console(file=out, width=200))
    return out.getvalue()


def test_anchors_and_supervised_spans_stand_where_the_trainer_puts_them() -> None:
    ebft = {"stride": 4, "context_length": 2, "generate_max_len": 3}
    config = run_config(["stdlib:abc.py"], data={"append_eos": False}, ebft=ebft)
    record = {"prompt": "abc", "completion": "0123456789"}
    transform = get_transform("prompt_completion")
    (document,) = transform.tokenize([record], byte_tokenizer(), config.data)
    text = mark_row(join([Piece(document, "h")]), config, byte_tokenizer())
    assert text.plain == "abc▸0123▸456789"  # anchors 3 and 7; 11 has no room for 3 tokens
    green = "".join(text.plain[s.start : s.end] for s in text.spans if s.style == "green")
    assert green == "0123456789"


def test_real_rows_with_their_facts() -> None:
    text = shown(run_config(["stdlib:encodings/*.py"], model=SCRATCH), rows=2)
    assert text.count("64 tokens · 64 supervised · 7 anchors") == 2
    assert "row 2 · train" in text
    assert '""" Standard "encodings" Package' in text.replace("▸", "")


def test_bad_rows_are_listed_and_terminal_codes_are_harmless(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": 5}, {"text": "\x1b[31mred" + "x" * 40}])
    text = shown(run_config([str(path)], model=SCRATCH))
    assert f"{path}:1" in text.replace("\n", "")
    assert "wrong type: int" in text
    assert "\x1b[31m" not in text
    assert "\\x1b" in text


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_no_model_is_made_for_a_preview(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = {"from_scratch": {"sources": ["stdlib:json/*.py"], "tokenizer": tokenizer, "vocab_size": 400}}
    assert "row 1" in shown(run_config(["stdlib:json/*.py"], model=model), rows=1)
    assert list(tmp_path.iterdir()) == []
