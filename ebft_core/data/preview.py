"""`ebft preview`: rows as the trainer sees them, before anything is trained.

Needs the tokenizer only: a model that the run makes itself is not made for a preview.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ebft_core.base_model import embedding_size
from ebft_core.config import RunConfig
from ebft_core.data.packing import Packer, Row
from ebft_core.data.pipeline import DataPipeline, Dropped, Result
from ebft_core.data.preview_examples import example_facts, show_example
from ebft_core.data.preview_text import ANCHOR, CONTEXT, SUPERVISED, TARGET_ONLY, legend, visible
from ebft_core.data.reader import BadRow
from ebft_core.data.remote import remote_of
from ebft_core.data.scan import scan_rows
from ebft_core.data.sources import SourceFile, resolve_sources
from ebft_core.data.split import is_heldout
from ebft_core.events import EventWriter
from ebft_core.hub import fetch_model
from ebft_core.rows import row_anchors
from ebft_core.stop import StopSignal
from ebft_core.tokenizer import Tokenizer, load_tokenizer, use_chat_template

SHOWN_IDS = 24
_DOCUMENTS_PER_ROW = 16


def preview(config: RunConfig, *, rows: int = 3, console: Console | None = None) -> None:
    """Print the first `rows` rows: ids, decoded text with its supervised spans coloured, anchors marked.

    Bad rows met on the way are listed, whatever `data.bad_rows` says.

    Raises:
        UserError: the sources or the tokenizer cannot be read.
    """
    out = console or Console()
    tokenizer, size = _tokenizer(config)
    files = resolve_sources(config.data.sources, remote=remote_of(config))
    few = _first_documents(config, rows)
    result = Result(0, [], Dropped())
    pipeline = DataPipeline(few, tokenizer, size, events=EventWriter(None, "preview"), stop=StopSignal())
    out.print(legend(structured=pipeline.maker is not None))
    for number, row in enumerate(islice(_rows(files, pipeline, result), rows), start=1):
        out.print(_panel(number, row, pipeline))
    if result.bad:
        out.print(_bad_table(result.bad))
    if result.truncated:
        out.print(f"{result.truncated} ground truth(s) lost their end", style="yellow")
    if result.dropped.pieces:
        out.print(
            f"{result.dropped.pieces} piece(s) too short for a context and a target were left out",
            style="yellow",
        )


def mark_row(row: Row, config: RunConfig, tokenizer: Tokenizer) -> Text:
    """The decoded row: supervised tokens green, other targets yellow, context dim, `▸` at anchors."""
    anchors = set(row_anchors(row.as_dict(), config).tolist())
    styles = np.where(row.labels >= 0, SUPERVISED, np.where(row.is_target, TARGET_ONLY, CONTEXT))
    starts = np.cumsum([0, *row.document_lengths])
    breaks = {
        0,
        len(row),
        *anchors,
        *starts.tolist(),
        *(np.flatnonzero(styles[1:] != styles[:-1]) + 1).tolist(),
    }
    text = Text()
    for start, stop in pairwise(sorted(breaks)):
        if start and start in starts:
            text.append("\n─── next document ───\n", style="cyan")
        if start in anchors:
            text.append_text(ANCHOR)
        text.append(visible(tokenizer.decode(row.input_ids[start:stop].tolist())), style=str(styles[start]))
    return text


def _first_documents(config: RunConfig, rows: int) -> RunConfig:
    """The run with as many documents as `rows` rows can need."""
    limit = rows * _DOCUMENTS_PER_ROW
    wanted = min(limit, config.data.max_documents or limit)
    return config.model_copy(update={"data": config.data.model_copy(update={"max_documents": wanted})})


def _rows(files: Sequence[SourceFile], pipeline: DataPipeline, result: Result) -> Iterator[Row]:
    data = pipeline.config.data
    result.bad += scan_rows(files, pipeline.transform, data).bad
    packer = Packer(data.sequence_length if data.packing else None)
    for piece in pipeline.pieces(files, result):
        yield from packer.add(piece)
    yield from packer.flush()


def _tokenizer(config: RunConfig) -> tuple[Tokenizer, int]:
    """The run's tokenizer and the size of the model's embedding."""
    model = config.model
    if model.from_scratch is not None:
        from ebft_core.scratch.corpus import read_corpus
        from ebft_core.scratch.tokenizer import make_tokenizer

        texts = read_corpus(model.from_scratch.sources) if model.from_scratch.tokenizer == "bpe" else []
        tokenizer = use_chat_template(make_tokenizer(model.from_scratch, texts), model)
        return tokenizer, len(tokenizer)
    name = str(model.name_or_path)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder, _ = fetch_model(name, model.revision, where="model.name_or_path", weights=False)
    return load_tokenizer(folder, model), embedding_size(folder)


def _panel(number: int, row: Row, pipeline: DataPipeline) -> Panel:
    config, tokenizer = pipeline.config, pipeline.tokenizer
    heldout = [is_heldout(key, config.data.heldout_fraction) for key in row.document_hashes]
    shown = row.input_ids[:SHOWN_IDS].tolist()
    ids = Text("ids " + " ".join(map(str, shown)) + (" …" if len(row) > SHOWN_IDS else ""), style="blue")
    body: Text | Group
    if pipeline.maker is not None:
        facts, body = example_facts(row, pipeline.maker.stop_ids), show_example(row, tokenizer)
    else:
        facts, body = _facts(row, config), mark_row(row, config, tokenizer)
    side = "held-out" if all(heldout) else "train"
    return Panel(Group(Text(facts), ids, body), title=f"row {number} · {side}")


def _facts(row: Row, config: RunConfig) -> str:
    anchors = len(row_anchors(row.as_dict(), config))
    return (
        f"{len(row)} tokens · {int((row.labels >= 0).sum())} supervised · {anchors} anchors · "
        f"{len(row.document_lengths)} document(s), prompt {row.prompt_lengths[0]} tokens"
    )


def _bad_table(bad: Sequence[BadRow]) -> Table:
    table = Table("where", "why", title=f"{len(bad)} row(s) that cannot be used", title_style="red")
    for row in bad[:20]:
        table.add_row(Text(row.origin), Text(row.reason))
    return table
