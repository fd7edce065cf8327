"""The preview shows the rows the trainer will see."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from ebft_core.config.schema import OwnRewardConfig
from ebft_core.data.packing import Piece, join
from ebft_core.data.preview import mark_row, preview
from ebft_core.data.preview_examples import example_facts, show_example
from ebft_core.data.structured import ExampleMaker
from ebft_core.data.transforms import get_transform
from tests.data.builders import byte_tokenizer, run_config, structured, write_jsonl
from tests.data.chats import CHATML, chat_tokenizer, talk

_COUNTS = (r"prompt (\d+)", r"ground truth (\d+)", r"(\d+) given")
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


def test_structured_examples_show_what_is_written_and_what_is_given() -> None:
    tokenizer = chat_tokenizer(CHATML)
    config = structured(["a"], transform="chat", chat={"examples": "first_turn", "supervise_thinking": False})
    rewarded = config.model_copy(update={"rewards": [OwnRewardConfig(module="m:f")]})
    maker = ExampleMaker(rewarded, get_transform("chat"), tokenizer)
    messages = talk("why?", "<think>hm</think>so", "and?", "that")
    ((example,),) = maker.make([{"messages": messages, "level": 3}])
    row = join([Piece(example.document, "h", example.extra)])
    console = Console(file=io.StringIO(), width=200, record=True)
    console.print(show_example(row, tokenizer))
    text = console.export_text(clear=False)
    order = [
        "prompt ─",
        "why?",
        "turn 1 ─",
        "▸<think>hm</think>so",
        "given, not written ─",
        "and?",
        "turn 2 ─",
        "that",
    ]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)
    assert all(text.count(part) == 1 for part in order)
    parts = [part for part in console.render(show_example(row, tokenizer)) if part.style]
    colours = {part.text.strip(): part.style.color for part in parts}
    assert colours["<think>hm</think>"].name == "yellow"
    assert colours["so<|im_end|>"].name == "green"
    assert colours["and?<|im_end|>"].name == "cyan"
    facts = example_facts(row, maker.stop_ids)
    assert "in 2 turn(s)" in facts
    assert "columns for rewards: level" in facts
    assert "truncated" not in facts
    cut = join([Piece(example.document.cut(0, len(row) - 1), "h")])
    assert "truncated" in example_facts(cut, maker.stop_ids)
    prompt, written, given = (int(re.search(what, facts)[1]) for what in _COUNTS)
    assert prompt + written + given == len(row)


def test_a_structured_run_is_previewed_with_its_bad_rows(tmp_path: Path) -> None:
    records = [{"prompt": "why?", "completion": "because " * 20}, {"prompt": "why?", "completion": ""}]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    text = shown(structured([str(path)], model=SCRATCH))
    assert "ground truth, turn 1" in text
    assert "1 ground truth(s) lost their end" in text
    assert "given between turns" in text
    assert "`completion` is empty" in text
