"""Rows of every format, and the place and reason of every bad one."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebft_core.config import SourceConfig
from ebft_core.data.reader import BadRow, Document, Row, read_files, take_documents
from ebft_core.data.sources import resolve_sources
from ebft_core.errors import UserError


def rows_of(path: Path, **fields: str) -> list[Row]:
    return list(read_files(resolve_sources([SourceConfig(path=str(path), **fields)])))


def records(rows: list[Row]) -> list[dict]:
    return [row.record for row in rows if isinstance(row, Document)]


def bad(rows: list[Row]) -> list[tuple[str, str]]:
    return [(row.origin.rpartition(":")[2], row.reason) for row in rows if isinstance(row, BadRow)]


def test_whole_file_text_is_one_document_without_its_bom(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert records(rows_of(tmp_path / "a.txt")) == [{"text": "one\r\ntwo"}]


def test_invalid_utf8_in_text_is_reported_by_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\nfine\nbr\xe9ak\n")
    assert bad(rows_of(tmp_path / "a.txt")) == [("3", "invalid UTF-8: byte 0xe9 at position 12")]


def test_real_files_that_are_not_utf8_are_found() -> None:
    rows = rows_of("stdlib:test/encoded_modules/module_*.py")  # Latin-1 and KOI8-R on purpose
    assert len(rows) == 2
    assert [reason.split(":")[0] for _, reason in bad(rows)] == ["invalid UTF-8"] * 2


def test_jsonl_reports_each_kind_of_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n{"text": \n[1]\n{"text": "\xff"}\n{"text": "b"}')
    rows = rows_of(path)
    assert records(rows) == [{"text": "a"}, {"text": "b"}]
    found = bad(rows)
    assert [line for line, _ in found] == ["2", "3", "4", "5"]
    for (_, reason), start in zip(
        found, ["empty line", "invalid JSON", "wrong type", "invalid UTF-8"], strict=True
    ):
        assert reason.startswith(start)


def test_csv_knows_the_line_where_a_row_begins(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'q,a\n"two\nlines",x\nonly\ny,\xff\n"z, ""z""",ok\n')
    rows = rows_of(path)
    assert records(rows) == [{"q": "two\nlines", "a": "x"}, {"q": 'z, "z"', "a": "ok"}]
    assert bad(rows) == [("4", "1 fields, the header has 2"), ("5", "invalid UTF-8")]


def test_csv_that_is_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('a,b\n"x"y,1\n')
    with pytest.raises(UserError, match="not valid CSV") as caught:
        rows_of(tmp_path / "a.csv")
    assert str(caught.value.where).endswith(":2")


def test_parquet_rows_and_one_with_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    raw = pa.array([b"one", b"tw\xff", None], type=pa.binary())
    text = pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2], raw.buffers()[0], 1, 0)
    pq.write_table(pa.table({"text": text}), path)
    rows = rows_of(path)
    assert records(rows) == [{"text": "one"}, {"text": None}]
    assert bad(rows) == [("2", "invalid UTF-8: byte 0xff at position 2")]


def test_a_file_that_is_no_parquet_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("hello")
    with pytest.raises(UserError, match="not a valid parquet file"):
        rows_of(tmp_path / "a.parquet")


def test_datasets_folder_and_its_splits(tmp_path: Path) -> None:
    one = datasets.Dataset.from_dict({"text": ["x", "y"]})
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": one, "test": one.select([1])}).save_to_disk(str(tmp_path / "two"))
    assert records(rows_of(tmp_path / "one")) == [{"text": "x"}, {"text": "y"}]
    assert records(rows_of(tmp_path / "two", split="test")) == [{"text": "y"}]
    with pytest.raises(UserError, match="no such split") as caught:
        rows_of(tmp_path / "two", split="dev")
    assert caught.value.expected == "test, train"


def test_limit_counts_documents_and_not_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "b"}\n{"text": "c"}\n')
    taken = list(take_documents(rows_of(path), 2))
    assert records(taken) == [{"text": "a"}, {"text": "b"}]
    assert len(taken) == 3


@given(st.lists(st.dictionaries(st.text(min_size=1), st.text(), min_size=1), max_size=5))
def test_jsonl_gives_back_what_was_written(tmp_path_factory: pytest.TempPathFactory, data: list) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in data))
    assert records(rows_of(path)) == data
