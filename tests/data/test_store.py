"""Rows on disk: what was written comes back, and equal rows give equal files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from ebft_core.data.packing import Row, join
from ebft_core.data.store import RowWriter, read_rows
from ebft_core.manifests import digest_files
from tests.data.test_packing import piece


def rows() -> list[Row]:
    return [join([piece(i, 3 + i % 5, i % 3), piece(i + 700, 2)]) for i in range(600)]  # more than one batch


def write(folder: Path, content: list[Row]) -> RowWriter:
    with RowWriter(folder / "out", folder / "work" / "x.arrow") as writer:
        for row in content:
            writer.write(row)
    return writer


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    writer = write(tmp_path, rows())
    back = read_rows(tmp_path / "out")
    assert len(back) == 600
    for got, row in zip(back, rows(), strict=True):
        assert got == {k: list(v) for k, v in row.as_dict().items()}
    assert writer.summary() == {
        "rows": 600,
        "documents": 1200,
        "tokens": sum(len(row) for row in rows()),
        "supervised_tokens": sum(label >= 0 for row in rows() for label in row.labels),
        "digest": writer.digest,
    }
    assert list((tmp_path / "work").iterdir()) == []


def test_equal_rows_give_equal_files_and_other_rows_do_not(tmp_path: Path) -> None:
    def digest(name: str, content: list[Row]) -> tuple[str, str]:
        digest = write(tmp_path / name, content).digest
        return digest, digest_files((tmp_path / name / "out").iterdir())

    first = digest("a", rows())
    assert digest("b", rows()) == first
    changed = digest("c", [*rows()[:-1], rows()[0]])
    assert changed[0] != first[0]
    assert changed[1] != first[1]


def test_an_error_leaves_no_folder(tmp_path: Path) -> None:
    wrong = replace(rows()[0], document_hashes=[3])
    with pytest.raises(pa.ArrowTypeError):
        write(tmp_path, [rows()[0], wrong])
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "work").iterdir()) == []
