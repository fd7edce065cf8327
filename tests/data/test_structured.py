"""The stage `tokenize` in structured mode, and the rules that hold whichever transform made an example."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebft_core.config import RunConfig
from ebft_core.config.data_section import FieldMapping
from ebft_core.config.schema import OwnRewardConfig
from ebft_core.data.document import IGNORE, RowError, TokenizedDocument
from ebft_core.data.extra import EXTRA_BYTES, extra_json
from ebft_core.data.stop_tokens import read_stop_token_ids
from ebft_core.data.store import SCHEMA, read_rows
from ebft_core.data.structured import ExampleMaker, check_example, truncate
from ebft_core.data.transforms import get_transform
from ebft_core.errors import UserError, UserErrors
from ebft_core.manifests import digest_files
from ebft_core.stages import tokenize_data
from tests.data.builders import (
    base_stage,
    data_config,
    stage_context,
    structured,
    tiny_model,
    word_tokenizer,
    write_jsonl,
)
from tests.data.chats import CHATML, chat_tokenizer, talk

REWARDS = [OwnRewardConfig(module="m:f")]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("base")
    return base_stage(root / "stage", tiny_model(root / "model", chat_tokenizer(CHATML)))


def run(config: RunConfig, base: Path, root: Path) -> tuple[dict[str, Any], Path]:
    context = stage_context(root, config, {"prepare_base": base})
    return tokenize_data.run(context), context.output


def all_rows(output: Path) -> list[dict[str, Any]]:
    return [dict(row) for side in ("train", "heldout") for row in read_rows(output / side)]


def pairs(count: int, answer: str = "answer") -> list[dict[str, str]]:
    return [{"prompt": f"question {i:02d}", "completion": f"{answer} {i:02d}"} for i in range(count)]


def test_each_record_becomes_a_row_of_prompt_and_ground_truth(base: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", pairs(30))
    report, output = run(structured([path]), base, tmp_path / "run")
    rows = all_rows(output)
    stop = chat_tokenizer(CHATML).eos_token_id
    expected = {(f"question {i:02d}", f"answer {i:02d}") for i in range(30)}
    found = set()
    for row in rows:
        (length,), (at,) = row["document_lengths"], row["prompt_lengths"]
        assert length == len(row["input_ids"])
        assert row["input_ids"][-1] == stop
        assert row["is_target"] == [i >= at for i in range(length)]
        assert row["labels"] == [IGNORE] * at + row["input_ids"][at:]
        found.add((bytes(row["input_ids"][:at]).decode(), bytes(row["input_ids"][at:-1]).decode()))
    assert found == expected
    assert set(rows[0]) == set(SCHEMA.names)
    assert (report["documents"], report["truncated"], report["stop_token_ids"]) == (30, 0, [stop])
    assert read_stop_token_ids(output) == [stop]


def test_short_documents_are_kept_whatever_strided_mode_would_need(base: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"{i:02d}", "completion": "b"} for i in range(30)])
    report, output = run(structured([path]), base, tmp_path / "run")
    assert (len(all_rows(output)), report["dropped_too_short"]) == (30, 0)


def test_a_long_ground_truth_loses_its_end_and_is_counted(base: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*pairs(28), *pairs(2, "a much longer answer")])
    report, output = run(structured([path], sequence_length=24), base, tmp_path / "run")
    assert report["truncated"] == 2
    assert max(len(row["input_ids"]) for row in all_rows(output)) == 24
    cut = [bytes(row["input_ids"][11:]) for row in all_rows(output) if len(row["input_ids"]) == 24]
    assert cut == [b"a much longer"] * 2


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "q" * 64, "completion": "a"}, "the prompt has 64 tokens"),
        ({"prompt": "", "completion": "a"}, "field `prompt` is empty"),
        ({"prompt": "q", "completion": " "}, "field `completion` is empty"),
        ({"prompt": "q"}, "missing field `completion`"),
        ({"prompt": "q", "completion": None}, "field `completion` is null"),
        ({"prompt": "q", "completion": "a</s>b"}, "goes on behind a token that ends turns"),
    ],
)
def test_a_record_without_an_example_is_a_bad_row_with_its_line(
    base: Path, tmp_path: Path, record: dict, reason: str
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*pairs(3), record, *pairs(20)])
    with pytest.raises(UserErrors) as caught:
        run(structured([path]), base, tmp_path / "fail")
    assert [error.where for error in caught.value.errors] == ["data.bad_rows", f"{path}:4"]
    assert reason in caught.value.errors[1].what
    keep = structured([path], bad_rows="quarantine", max_bad_fraction=0.1)
    report, output = run(keep, base, tmp_path / "keep")
    assert (report["documents"], report["quarantined"]) == (23, 1)
    line = json.loads((output / "quarantine.jsonl").read_text())
    assert (line["origin"], reason in line["reason"]) == (f"{path}:4", True)


def test_turns_of_a_conversation_stay_on_one_side(base: Path, tmp_path: Path) -> None:
    records = [{"messages": talk(f"q{i}", "A", "r", "B", "s", "C")} for i in range(24)]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    data = {"transform": "chat", "sequence_length": 512, "heldout_fraction": 0.4}
    report, output = run(structured([path], **data, chat={"examples": "every_turn"}), base, tmp_path / "run")
    hashes = {
        side: [key for row in read_rows(output / side) for key in row["document_hashes"]]
        for side in ("train", "heldout")
    }
    assert not set(hashes["train"]) & set(hashes["heldout"])
    assert all(keys.count(key) == 3 for keys in hashes.values() for key in keys)
    assert (report["documents"], report["train"]["rows"] + report["heldout"]["rows"]) == (24, 72)
    _, last = run(structured([path], **data), base, tmp_path / "last")
    assert {row["document_hashes"][0] for row in read_rows(last / "heldout")} == set(hashes["heldout"])


def test_a_side_on_which_no_example_is_left(base: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", pairs(30))
    config = structured([path], sequence_length=5, bad_rows="quarantine", max_bad_fraction=1.0)
    with pytest.raises(UserError, match="no example is left") as caught:
        run(config, base, tmp_path / "run")
    assert "30 of 30 rows are bad" in str(caught.value.value)


def test_plain_text_has_no_prompt(base: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * 50}])
    with pytest.raises(UserError, match="no prompt") as caught:
        run(structured([path], transform="text"), base, tmp_path / "run")
    assert caught.value.where == "data.transform"


def test_columns_are_kept_for_rewards(base: Path, tmp_path: Path) -> None:
    records = [{**pair, "level": i, "tags": ["é", None]} for i, pair in enumerate(pairs(30))]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    config = structured([path]).model_copy(update={"rewards": REWARDS})
    first, output = run(config, base, tmp_path / "run")
    for row in all_rows(output):
        extra = json.loads(row["extra"])
        prompt = bytes(row["input_ids"][: row["prompt_lengths"][0]]).decode()
        original = records[extra["level"]]
        assert {"prompt": prompt, **extra} == original
    second, again = run(config, base, tmp_path / "again")
    files = [p.relative_to(output) for p in output.rglob("*") if p.is_file()]
    assert digest_files(output / f for f in files) == digest_files(again / f for f in files)
    few = structured([path], fields={"extra": ["tags"]}).model_copy(update={"rewards": REWARDS})
    third, fewer = run(few, base, tmp_path / "few")
    assert {row["extra"] for row in all_rows(fewer)} == {json.dumps({"tags": ["é", None]})}
    assert first["digest"] == second["digest"] != third["digest"]


def test_the_conversation_itself_is_not_kept_twice() -> None:
    config = structured(["a"], transform="chat").model_copy(update={"rewards": REWARDS})
    maker = ExampleMaker(config, get_transform("chat"), chat_tokenizer(CHATML))
    ((example,),) = maker.make([{"messages": talk("q", "A"), "answer": 4}])
    assert example.extra == '{"answer": 4}'
    plain = structured(["a"], transform="chat")
    ((example,),) = ExampleMaker(plain, get_transform("chat"), chat_tokenizer(CHATML)).make(
        [{"messages": talk("q", "A"), "answer": 4}]
    )
    assert example.extra is None


def test_columns_that_cannot_be_kept_say_so() -> None:
    config, chosen = data_config(), data_config(fields=FieldMapping(extra=["a", "b"]))
    assert json.loads(extra_json({"a": datetime.date(2020, 1, 2)}, set(), config)) == {"a": "2020-01-02"}
    assert extra_json({"b": 1, "a": 2, "c": b"x"}, {"a"}, chosen) == '{"a": 2, "b": 1}'
    with pytest.raises(RowError, match=r"field `a` cannot be kept for rewards: bytes is not JSON"):
        extra_json({"a": b"x"}, set(), config)
    with pytest.raises(RowError, match="missing field `b`"):
        extra_json({"a": 1}, set(), chosen)
    with pytest.raises(RowError, match="the largest is `big`"):
        extra_json({"big": "x" * EXTRA_BYTES, "small": "y"}, set(), config)
    fits = "x" * (EXTRA_BYTES - len('{"a": ""}'))
    assert len(extra_json({"a": fits}, set(), config)) == EXTRA_BYTES


@pytest.mark.parametrize("prompt", ["w0", "<s> w0"])
def test_bos_is_never_doubled_without_a_template(prompt: str) -> None:
    config = structured(["a"])
    maker = ExampleMaker(config, get_transform("prompt_completion"), word_tokenizer(bos=True))
    ((example,),) = maker.make([{"prompt": prompt, "completion": " w1"}])
    assert example.document.input_ids.tolist() == [0, 3, 4, 1]
    assert example.document.prompt_length == 2


def document(pattern: str, ids: list[int] | None = None, prompt: int | None = None) -> TokenizedDocument:
    """`.` given, `#` written."""
    target = np.array([character == "#" for character in pattern])
    numbers = np.arange(10, 10 + len(pattern)) if ids is None else np.array(ids)
    at = pattern.find("#") if prompt is None else prompt
    return TokenizedDocument(numbers, np.where(target, numbers, IGNORE), target, at)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (document("##"), "the prompt has no tokens"),
        (document("..", prompt=2), "the ground truth has no tokens"),
        (document("..##", prompt=1), "does not begin where the prompt ends"),
        (document(".##.", prompt=2), "does not begin where the prompt ends"),
        (document(".###", [5, 6, 1, 7]), "goes on behind a token that ends turns"),
    ],
)
def test_what_is_no_example(bad: TokenizedDocument, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        check_example(bad, [1])


def test_turns_end_with_their_stop_token() -> None:
    check_example(document(".##.##", [5, 6, 1, 7, 6, 1]), [1])
    check_example(document("..#", [1, 1, 5]), [1])


@given(pattern=st.text("#.", min_size=1, max_size=12), length=st.integers(2, 14))
def test_truncation_ends_with_a_written_token(pattern: str, length: int) -> None:
    whole = document(f".#{pattern}")
    cut = truncate(whole, length)
    assert len(cut) <= length
    assert cut.input_ids.tolist() == whole.input_ids[: len(cut)].tolist()
    assert bool(cut.is_target[-1])
    assert not whole.is_target[len(cut) : length].any()


def test_a_prompt_as_long_as_a_row_is_refused() -> None:
    assert len(truncate(document("..###"), 3)) == 3
    with pytest.raises(RowError, match="the prompt has 2 tokens"):
        truncate(document("..###"), 2)
