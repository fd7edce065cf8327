"""Columns of a record that are kept beside its example, for reward functions of the user's own."""

from __future__ import annotations

import datetime
import decimal
import json
import uuid
from typing import TYPE_CHECKING, Any

from ebft_core.data.document import Record, RowError

if TYPE_CHECKING:
    from ebft_core.config import DataConfig

EXTRA_BYTES = 65_536
"""Bytes of JSON a row may keep: a training row should not drag a document along with it."""

_AS_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)


def extra_json(record: Record, read: set[str], config: DataConfig) -> str:
    """The kept columns as one JSON object, keys sorted.

    Args:
        read: columns that hold the prompt or the conversation; left out unless `data.fields.extra` asks.

    Raises:
        RowError: a column is missing, cannot be written as JSON, or all together are too large.
    """
    wanted = config.fields.extra
    names = sorted(record.keys() - read) if wanted is None else sorted(set(wanted))
    columns = {name: _column(record, name) for name in names}
    text = f"{{{', '.join(f'{json.dumps(name)}: {value}' for name, value in columns.items())}}}"
    size = len(text.encode())
    if size > EXTRA_BYTES:
        largest = max(columns, key=lambda name: len(columns[name]))
        raise RowError(
            f"its columns for rewards take {size} bytes, more than {EXTRA_BYTES} (the largest is "
            f"`{largest}`); name the ones that rewards read in `data.fields.extra`"
        )
    return text


def _column(record: Record, name: str) -> str:
    if name not in record:
        raise RowError(f"missing field `{name}`")
    try:
        return json.dumps(record[name], default=_as_text)
    except (TypeError, ValueError) as error:
        raise RowError(
            f"field `{name}` cannot be kept for rewards: {error}; name others in `data.fields.extra`"
        ) from error


def _as_text(value: Any) -> str:
    if isinstance(value, _AS_TEXT):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
