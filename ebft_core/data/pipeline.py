"""Second pass over the sources: tokenize in batches, cut, split, pack, write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebft_core.config import RunConfig
from ebft_core.data.document import RowError, TokenizedDocument
from ebft_core.data.exclusion import read_exclusion
from ebft_core.data.packing import Packer, Piece, cut, has_room
from ebft_core.data.reader import BadRow, Document
from ebft_core.data.remote import remote_of
from ebft_core.data.scan import Scan, apply_policy, check_row, scan_rows, source_rows
from ebft_core.data.sources import SourceFile, resolve_sources
from ebft_core.data.split import check_split, is_heldout
from ebft_core.data.store import RowWriter
from ebft_core.data.structured import ExampleMaker
from ebft_core.data.transforms import get_transform
from ebft_core.errors import UserError
from ebft_core.events import EventWriter
from ebft_core.stage_runner import Preempted
from ebft_core.stop import StopSignal
from ebft_core.tokenizer import Tokenizer

BATCH_DOCUMENTS = 1000
BATCH_CHARACTERS = 4_000_000

TRAIN, HELDOUT = "train", "heldout"


@dataclass
class Dropped:
    """Pieces without room for an anchor and its target, and documents of which nothing is left."""

    pieces: int = 0
    documents: int = 0
    longest: int = 0


@dataclass
class Result:
    """Rows read, the bad ones among them, dropped pieces, and what was written per side.

    `excluded` counts the documents that `data.exclude_hashes` leaves out, `truncated` the structured examples
    whose ground truth lost its end.
    """

    rows: int
    bad: list[BadRow]
    dropped: Dropped
    excluded: int = 0
    truncated: int = 0
    sides: dict[str, dict[str, Any]] = field(default_factory=dict)


class DataPipeline:
    """Turns the sources of a run into the `train` and `heldout` folders.

    Args:
        config: the run.
        tokenizer: from `load_tokenizer`.
        embedding_size: rows of the model's embedding; ids beyond it are refused.
        events, stop: the stage's journal and stop signal.

    Attributes:
        maker: makes the examples of structured mode; None in strided mode.

    Raises:
        UserError: no such transform, or one that cannot make the examples of structured mode.
    """

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Tokenizer,
        embedding_size: int,
        *,
        events: EventWriter,
        stop: StopSignal,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.embedding_size = embedding_size
        self.events = events
        self.stop = stop
        self.transform = get_transform(config.data.transform)
        structured = config.ebft.mode == "structured"
        self.maker = ExampleMaker(config, self.transform, tokenizer) if structured else None
        self._excluded = read_exclusion(config.data)
        self._sides_needed = (TRAIN, HELDOUT) if config.evaluate.heldout is None else (TRAIN,)

    def write(self, output: Path, work: Path) -> Result:
        """Read, check, tokenize and write everything.

        Raises:
            UserError: bad sources, bad rows beyond the policy, an empty side, no room for a target in
                any document, or token ids beyond the embedding.
            Preempted: asked to stop.
        """
        files = resolve_sources(self.config.data.sources, remote=remote_of(self.config))
        extra = self.maker is not None and bool(self.config.rewards)
        scan = self.scan(files)
        result = Result(scan.rows, list(scan.bad), Dropped(), scan.excluded)
        with ExitStack() as stack:
            writers = {
                side: stack.enter_context(RowWriter(output / side, work / f"{side}.arrow", extra=extra))
                for side in (TRAIN, HELDOUT)
            }
            self._write_rows(files, result, writers)
            self._check(result, writers)
        result.sides = {side: writer.summary() for side, writer in writers.items()}
        return result

    def scan(self, files: Sequence[SourceFile]) -> Scan:
        """The first pass; applies the policy for bad rows and checks the split."""
        scan = scan_rows(
            files,
            self.transform,
            self.config.data,
            lambda done, total: self._heartbeat("reading", done, total, "files"),
            excluded=self._excluded,
        )
        apply_policy(scan.bad, scan.rows, self.config.data)
        if not scan.document_hashes:
            raise UserError(
                "the sources hold no document" if not scan.excluded else "the sources hold no other document",
                where="data.sources",
                value=f"{scan.rows} rows, {scan.excluded} of them in data.exclude_hashes",
            )
        check_split(
            scan.document_hashes,
            self.config.data.heldout_fraction,
            heldout_needed=HELDOUT in self._sides_needed,
        )
        return scan

    def pieces(self, files: Sequence[SourceFile], result: Result) -> Iterator[Piece]:
        """Tokenized pieces in the order of the sources; bad rows and dropped pieces go into `result`."""
        done = 0
        for batch in _batches(source_rows(files, self.config.data)):
            documents = [row for row in batch if isinstance(row, Document)]
            checked = [(row, check_row(row, self.transform, self.config.data)) for row in documents]
            good = [(row, key) for row, key in checked if isinstance(key, str) and key not in self._excluded]
            if self.maker is None:
                yield from self._cut(good, result)
            else:
                yield from self._made(self.maker, good, result)
            done += len(batch)
            self._heartbeat("tokenizing", done, result.rows, "documents")

    def _write_rows(self, files: Sequence[SourceFile], result: Result, writers: dict[str, RowWriter]) -> None:
        data = self.config.data
        packers = {side: Packer(data.sequence_length if data.packing else None) for side in writers}
        for piece in self.pieces(files, result):
            side = HELDOUT if is_heldout(piece.document_hash, data.heldout_fraction) else TRAIN
            for row in packers[side].add(piece):
                writers[side].write(row)
        for side, packer in packers.items():
            for row in packer.flush():
                writers[side].write(row)

    def _cut(self, rows: list[tuple[Document, str]], result: Result) -> Iterator[Piece]:
        """Strided mode: documents cut to the length of a row, without pieces too short for an anchor."""
        records, dropped = [row.record for row, _ in rows], result.dropped
        tokenized = self.transform.tokenize(records, self.tokenizer, self.config.data)
        for (row, key), document in zip(rows, tokenized, strict=True):
            if isinstance(document, RowError):
                result.bad.append(BadRow(row.origin, str(document)))
                continue
            self._check_ids(document, row.origin)
            parts = cut(document, self.config.data.sequence_length)
            fits = [has_room(part, self.config.ebft) for part in parts]
            too_short = [len(part) for part, fit in zip(parts, fits, strict=True) if not fit]
            dropped.pieces += len(too_short)
            dropped.longest = max(dropped.longest, *too_short, 0)
            dropped.documents += not any(fits)
            yield from (Piece(part, key) for part, fit in zip(parts, fits, strict=True) if fit)

    def _made(self, maker: ExampleMaker, rows: list[tuple[Document, str]], result: Result) -> Iterator[Piece]:
        """Structured mode: examples, each a row of its own; those of one record share its hash."""
        made = maker.make([row.record for row, _ in rows])
        for (row, key), examples in zip(rows, made, strict=True):
            if isinstance(examples, RowError):
                result.bad.append(BadRow(row.origin, str(examples)))
                continue
            for example in examples:
                self._check_ids(example.document, row.origin)
                result.truncated += example.truncated
                yield Piece(example.document, key, example.extra)

    def _check_ids(self, document: TokenizedDocument, origin: str) -> None:
        highest = int(document.input_ids.max())
        if highest >= self.embedding_size:
            raise UserError(
                "a token id lies beyond the model's embedding",
                where=origin,
                value=f"{highest} ({self.tokenizer.convert_ids_to_tokens(highest)})",
                expected=f"ids below {self.embedding_size}",
                hint="the tokenizer does not belong to this model",
            )

    def _check(self, result: Result, writers: dict[str, RowWriter]) -> None:
        """The checks that only tokenizing can decide."""
        apply_policy(result.bad, result.rows, self.config.data)
        empty = [side for side in self._sides_needed if writers[side].rows == 0]
        if not empty:
            return
        if self.maker is not None:
            raise UserError(
                f"no example is left for the {empty[0]} rows",
                where="data.sources",
                value=f"{len(result.bad)} of {result.rows} rows are bad",
                hint="mend the rows, add others, or change `data.heldout_fraction`",
            )
        ebft = self.config.ebft
        need = max(1, ebft.context_length, ebft.min_completion_prefix) + ebft.generate_max_len
        which = "every document" if len(empty) == len(writers) else f"every {empty[0]} document"
        raise UserError(
            f"{which} is too short for a context and a target",
            where="data.sources",
            value=f"the longest has {result.dropped.longest} tokens",
            expected=f"at least {need} tokens for ebft.context_length and ebft.generate_max_len",
            hint="use longer documents, or smaller ebft.context_length and ebft.generate_max_len",
        )

    def _heartbeat(self, phase: str, done: int, total: int, unit: str) -> None:
        self.events.progress(phase, done, total, unit)
        if self.stop.requested:
            raise Preempted(f"tokenize: while {phase}")


def _batches(rows: Iterable[Any]) -> Iterator[list[Any]]:
    """Batches bounded by documents and, roughly, by characters."""
    batch: list[Any] = []
    characters = 0
    for row in rows:
        batch.append(row)
        if isinstance(row, Document):
            characters += sum(len(value) for value in row.record.values() if isinstance(value, str))
        if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
