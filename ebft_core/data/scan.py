"""First pass over the sources: every row is read and checked, nothing is tokenized yet.

So bad rows, absent columns and an empty split are reported before the expensive part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from ebft_core.config import DataConfig
from ebft_core.data.document import RowError, content_hash
from ebft_core.data.reader import BadRow, Document, Row, read_files, take_documents
from ebft_core.data.sources import SourceFile
from ebft_core.data.transforms import Transform
from ebft_core.errors import UserError, UserErrors

SHOWN = 20
"""Bad rows listed in an error; the rest is counted."""
_COLUMN_SAMPLE = 1000


@dataclass
class Scan:
    """What the first pass found: hashes of the usable documents in order, the bad rows, and how many
    documents `data.exclude_hashes` leaves out."""

    document_hashes: list[str] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    excluded: int = 0

    @property
    def rows(self) -> int:
        """All rows, whatever became of them."""
        return len(self.document_hashes) + len(self.bad) + self.excluded


def scan_rows(
    files: Sequence[SourceFile],
    transform: Transform,
    config: DataConfig,
    report: Callable[[int, int], None] = lambda done, total: None,
    *,
    excluded: Set[str] = frozenset(),
) -> Scan:
    """Read and check everything once.

    Args:
        excluded: hashes of documents to leave out.
        report: called with (files begun, files) at every file.

    Raises:
        UserError: a source cannot be read, or no row has a column that the transform needs.
    """
    scan = Scan()
    columns: set[str] = set()
    seen = 0
    for row in source_rows(_announced(files, report), config):
        if isinstance(row, Document) and seen < _COLUMN_SAMPLE:
            columns |= row.record.keys()
            seen += 1
            if seen == _COLUMN_SAMPLE:
                check_columns(columns, transform, config)
        checked = check_row(row, transform, config)
        if isinstance(checked, BadRow):
            scan.bad.append(checked)
        elif checked in excluded:
            scan.excluded += 1
        else:
            scan.document_hashes.append(checked)
    if seen:
        check_columns(columns, transform, config)
    return scan


def _announced(files: Sequence[SourceFile], report: Callable[[int, int], None]) -> Iterator[SourceFile]:
    for number, file in enumerate(files):
        report(number, len(files))
        yield file


def source_rows(files: Iterable[SourceFile], config: DataConfig) -> Iterator[Row]:
    """The rows of the sources, `data.max_documents` of them if that is set."""
    return take_documents(read_files(files, text_column=config.fields.text), config.max_documents)


def check_row(row: Row, transform: Transform, config: DataConfig) -> str | BadRow:
    """The hash of a usable document, or why it is none."""
    if isinstance(row, BadRow):
        return row
    try:
        return content_hash(transform.content(row.record, config))
    except RowError as error:
        return BadRow(row.origin, str(error))


def check_columns(found: set[str], transform: Transform, config: DataConfig) -> None:
    """Refuse sources in which a needed column does not exist at all.

    Raises:
        UserError: with the columns that do exist.
    """
    for key, names in transform.columns(config).items():
        if found.isdisjoint(names):
            raise UserError(
                f"no row has the column {' or '.join(f'`{name}`' for name in names)}",
                where=key,
                value=names[0],
                expected=f"one of the columns found: {', '.join(sorted(map(str, found))) or 'none'}",
                hint=f"name the column with `{key}`, or choose another `data.transform`",
            )


def apply_policy(bad: Sequence[BadRow], total: int, config: DataConfig) -> None:
    """Accept or refuse the bad rows among `total` rows, as `data.bad_rows` says.

    Raises:
        UserErrors: the count and the first bad rows.
    """
    if not bad:
        return
    limit = config.max_bad_fraction if config.bad_rows == "quarantine" else 0.0
    if config.bad_rows == "quarantine" and len(bad) <= limit * total:
        return
    summary = UserError(
        f"{len(bad)} of {total} rows cannot be used" + (f"; the first {SHOWN}:" if len(bad) > SHOWN else ":"),
        where="data.max_bad_fraction" if limit else "data.bad_rows",
        value=f"{bad[0].origin}: {bad[0].reason}",
        expected=f"at most {limit:.2%} bad rows" if limit else "no bad row",
        hint="mend the rows, or set `data.bad_rows: quarantine` and `data.max_bad_fraction`",
    )
    raise UserErrors([summary, *(UserError(row.reason, where=row.origin) for row in bad[:SHOWN])])


def write_quarantine(path: Path, bad: Sequence[BadRow]) -> None:
    """One JSON line per bad row: `origin` and `reason`. No bad rows, no file."""
    if bad:
        lines = [json.dumps({"origin": row.origin, "reason": row.reason}, ensure_ascii=False) for row in bad]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="backslashreplace")
