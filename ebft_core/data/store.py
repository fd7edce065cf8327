"""Rows on disk as a `datasets` folder, written as they come and identical for identical rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from ebft_core.data.packing import Row

SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("labels", pa.list_(pa.int32())),
        ("is_target", pa.list_(pa.bool_())),
        ("document_lengths", pa.list_(pa.int32())),
        ("prompt_lengths", pa.list_(pa.int32())),
        ("document_hashes", pa.list_(pa.string())),
    ]
)
EXTRA = pa.field("extra", pa.string())
"""A further column of structured examples in runs with own rewards."""
_BATCH_ROWS = 512


class RowWriter:
    """Streams rows into `folder`; a context manager. The folder is a `datasets` folder after a clean exit.

    Args:
        folder: the result.
        scratch: file for the rows until then.
        extra: whether the rows have the column `extra`.

    Attributes:
        rows, tokens, supervised: what was written.
        digest: hex sha256 of the rows; known after the exit.
    """

    def __init__(self, folder: Path, scratch: Path, *, extra: bool = False) -> None:
        self.folder = folder
        self.schema = SCHEMA.append(EXTRA) if extra else SCHEMA
        self.rows = self.tokens = self.supervised = 0
        self.digest = ""
        self._scratch = scratch
        self._seen: set[str] = set()
        self._batch: list[Row] = []
        self._hash = hashlib.sha256()

    def __enter__(self) -> RowWriter:
        self._scratch.parent.mkdir(parents=True, exist_ok=True)
        self._stream = pa.ipc.new_stream(str(self._scratch), self.schema)
        return self

    def write(self, row: Row) -> None:
        """Add one row."""
        self.rows += 1
        self.tokens += len(row)
        self.supervised += int((row.labels >= 0).sum())
        self._seen.update(row.document_hashes)
        self._hash.update(_digest(row))
        self._batch.append(row)
        if len(self._batch) >= _BATCH_ROWS:
            self._flush()

    def summary(self) -> dict[str, Any]:
        """The counts and the digest, for `data.json`."""
        return {
            "rows": self.rows,
            "documents": len(self._seen),
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "digest": self.digest,
        }

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._stream:
                if error is None:
                    self._flush()
            if error is None:
                self.digest = self._hash.hexdigest()
                _save(self._scratch, self.folder, self.schema, fingerprint=self.digest[:16])
        finally:
            self._scratch.unlink()

    def _flush(self) -> None:
        if not self._batch:
            return
        self._stream.write_batch(_record_batch(self._batch, self.schema))
        self._batch = []


def read_rows(folder: Path) -> Any:
    """The rows of a `datasets` folder, memory-mapped (`datasets.Dataset`)."""
    import datasets

    return datasets.load_from_disk(str(folder))


def read_document_hashes(folder: Path) -> set[str]:
    """Hashes of all documents that the rows of a `datasets` folder hold, whole or in part."""
    return {key for keys in read_rows(folder).with_format(None)["document_hashes"] for key in keys}


def _save(stream: Path, folder: Path, schema: pa.Schema, *, fingerprint: str) -> None:
    import datasets
    from datasets.table import MemoryMappedTable

    table = MemoryMappedTable.from_file(str(stream))
    info = datasets.DatasetInfo(features=datasets.Features.from_arrow_schema(schema))
    # Without a fingerprint `datasets` makes one from file times, and equal rows would differ on disk.
    dataset = datasets.Dataset(table, info=info, fingerprint=fingerprint)
    # `datasets` writes no file at all for no rows, and cannot read that back.
    dataset.save_to_disk(str(folder), num_shards=None if len(table) else 1)


def _digest(row: Row) -> bytes:
    arrays = (row.input_ids, row.labels, row.is_target)
    lists = json.dumps([row.document_lengths, row.prompt_lengths, row.document_hashes])
    text = lists + (row.extra or "")
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays) + text.encode()).digest()


def _record_batch(rows: Sequence[Row], schema: pa.Schema) -> pa.RecordBatch:
    columns = [
        _token_column([row.input_ids for row in rows], pa.int32()),
        _token_column([row.labels for row in rows], pa.int32()),
        _token_column([row.is_target for row in rows], pa.bool_()),
        pa.array([row.document_lengths for row in rows], type=pa.list_(pa.int32())),
        pa.array([row.prompt_lengths for row in rows], type=pa.list_(pa.int32())),
        pa.array([row.document_hashes for row in rows], type=pa.list_(pa.string())),
    ]
    if EXTRA.name in schema.names:
        columns.append(pa.array([row.extra for row in rows], type=EXTRA.type))
    return pa.record_batch(columns, schema=schema)


def _token_column(arrays: Sequence[np.ndarray], kind: pa.DataType) -> pa.ListArray:
    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    offsets[1:] = np.cumsum([len(array) for array in arrays])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays), type=kind))
