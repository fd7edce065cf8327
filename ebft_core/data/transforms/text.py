"""Transform `text`: a document is a stretch of text; every token is supervised and may be a target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ebft_core.data.document import Record, RowError, TokenizedDocument, string_field
from ebft_core.data.encoding import bos_prefix, encode, with_bos, with_eos
from ebft_core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ebft_core.config import DataConfig


def columns(config: DataConfig) -> dict[str, list[str]]:
    """Config key -> columns, one of which must exist."""
    return {"data.fields.text": [config.fields.text]}


def content(record: Record, config: DataConfig) -> list[Any]:
    """The parts that make the document what it is. Raises RowError for a bad row."""
    return [string_field(record, config.fields.text)]


def tokenize(
    records: Sequence[Record], tokenizer: Tokenizer, config: DataConfig
) -> list[TokenizedDocument | RowError]:
    """One document per record, of any length: cutting into rows comes later."""
    prefix = bos_prefix(tokenizer)
    texts = [string_field(record, config.fields.text) for record in records]
    documents: list[TokenizedDocument | RowError] = []
    for ids in encode(tokenizer, texts):
        full = with_eos(with_bos(ids, prefix), tokenizer, config.append_eos)
        array = np.asarray(full, dtype=np.int32)
        documents.append(TokenizedDocument(array, array, np.ones(len(array), dtype=bool)))
    return documents
