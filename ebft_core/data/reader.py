"""Reads source files row by row. A row that cannot be read becomes a `BadRow` with its place.

`datasets` is not used to read local files: it accepts invalid UTF-8 and serves a stale cache for a file
that was changed within the same second.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ebft_core.data.sources import SourceFile
from ebft_core.errors import UserError
from ebft_core.hub import hub_errors

_BOM = b"\xef\xbb\xbf"
_PARQUET_ROWS = 256
_CSV_FIELD_LIMIT = 1 << 30


@dataclass(frozen=True)
class Document:
    """One row of a source.

    Args:
        record: its columns; whole-file text has the single column `text`.
        origin: `file:line` (row number, counted from 1, for files without lines).
    """

    record: dict[str, Any]
    origin: str


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used: where it stands, and why."""

    origin: str
    reason: str


Row = Document | BadRow


def read_files(files: Iterable[SourceFile], *, text_column: str = "text") -> Iterator[Row]:
    """The rows of all files, in order.

    Args:
        files: from `resolve_sources`.
        text_column: name of the column that holds a whole-file document.

    Raises:
        UserError: a file cannot be opened or is not of its format at all.
    """
    for file in files:
        try:
            if file.format == "text":
                yield _read_text(file, text_column)
            else:
                yield from _READERS[file.format](file)
        except OSError as error:
            raise UserError("cannot read a source file", where=file.name, hint=str(error)) from error


def take_documents(rows: Iterable[Row], limit: int | None) -> Iterator[Row]:
    """Rows up to and including the `limit`-th document; bad rows do not count. None: all rows."""
    documents = 0
    for row in rows:
        yield row
        documents += isinstance(row, Document)
        if documents == limit:
            return


def _read_text(file: SourceFile, column: str) -> Row:
    data = file.path.read_bytes()
    try:
        text = data.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.removeprefix(_BOM).count(b"\n", 0, error.start) + 1
        return BadRow(f"{file.name}:{line}", _invalid_utf8(error))
    return Document({column: text}, f"{file.name}:1")


def _read_jsonl(file: SourceFile) -> Iterator[Row]:
    with open(file.path, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            content = line.removeprefix(_BOM) if number == 1 else line
            yield _parse_json_line(content, f"{file.name}:{number}")


def _parse_json_line(line: bytes, origin: str) -> Row:
    if not line.strip():
        return BadRow(origin, "empty line")
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(origin, _invalid_utf8(error))
    except ValueError as error:
        return BadRow(origin, f"invalid JSON: {error}")
    if not isinstance(record, dict):
        return BadRow(origin, f"wrong type: a JSON object is expected, this is {type(record).__name__}")
    return Document(record, origin)


def _read_csv(file: SourceFile) -> Iterator[Row]:
    csv.field_size_limit(_CSV_FIELD_LIMIT)
    # Undecodable bytes pass through the CSV parser as surrogates, so that the bad row is known by its line.
    with open(file.path, encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        reader = csv.reader(stream, strict=True)
        try:
            header = next(reader, None)
            if not header:
                raise UserError("the CSV file has no header line", where=f"{file.name}:1")
            line = reader.line_num + 1
            for values in reader:
                yield _csv_row(header, values, f"{file.name}:{line}")
                line = reader.line_num + 1
        except csv.Error as error:
            raise UserError(
                "not valid CSV", where=f"{file.name}:{reader.line_num}", hint=str(error)
            ) from error


def _csv_row(header: list[str], values: list[str], origin: str) -> Row:
    if not values:
        return BadRow(origin, "empty line")
    if len(values) != len(header):
        return BadRow(origin, f"{len(values)} fields, the header has {len(header)}")
    if any(_has_surrogates(value) for value in values):
        return BadRow(origin, "invalid UTF-8")
    return Document(dict(zip(header, values, strict=True)), origin)


def _has_surrogates(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def _read_parquet(file: SourceFile) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file.path)
        start = 1
        for batch in table.iter_batches(batch_size=_PARQUET_ROWS):
            for index in range(batch.num_rows):
                yield _arrow_row(batch, index, f"{file.name}:{start + index}")
            start += batch.num_rows
    except pa.ArrowException as error:
        raise UserError("not a valid parquet file", where=file.name, hint=str(error)) from error


def _arrow_row(batch: Any, index: int, origin: str) -> Row:
    try:
        return Document(batch.slice(index, 1).to_pylist()[0], origin)
    except UnicodeDecodeError as error:
        return BadRow(origin, _invalid_utf8(error))


def _read_dataset(file: SourceFile) -> Iterator[Row]:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(file.path))
    except (ValueError, KeyError) as error:
        raise UserError("not a folder saved by `datasets`", where=file.name, hint=str(error)) from error
    if isinstance(loaded, datasets.DatasetDict):
        loaded = _pick_split(loaded, file)
    yield from _dataset_rows(loaded, file.name)


def _read_hub(file: SourceFile) -> Iterator[Row]:
    import datasets

    where = "data.sources"
    try:
        with hub_errors(str(file.path), file.revision, where=where):
            loaded = datasets.load_dataset(str(file.path), revision=file.revision, split=file.split)
    except ValueError as error:  # unknown split or configuration
        raise UserError(
            "cannot load the hub dataset", where=where, value=file.name, hint=str(error)
        ) from error
    yield from _dataset_rows(loaded, file.name)


def _pick_split(loaded: Any, file: SourceFile) -> Any:
    if file.split not in loaded:
        raise UserError(
            "no such split", where=f"{file.name}", value=file.split, expected=", ".join(sorted(loaded))
        )
    return loaded[file.split]


def _dataset_rows(loaded: Any, name: str) -> Iterator[Row]:
    for index in range(len(loaded)):
        try:
            yield Document(dict(loaded[index]), f"{name}:{index + 1}")
        except UnicodeDecodeError as error:
            yield BadRow(f"{name}:{index + 1}", _invalid_utf8(error))


def _invalid_utf8(error: UnicodeDecodeError) -> str:
    return f"invalid UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start}"


_READERS: dict[str, Callable[[SourceFile], Iterator[Row]]] = {
    "jsonl": _read_jsonl,
    "csv": _read_csv,
    "parquet": _read_parquet,
    "dataset": _read_dataset,
    "hub": _read_hub,
}
