"""The tokens at which a sampler ends a turn, recorded with the tokenized data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ebft_core.data.templates import end_of_turn
from ebft_core.errors import UserError
from ebft_core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ebft_core.config import DataConfig

_KEY = "stop_token_ids"


def stop_token_ids(tokenizer: Tokenizer, config: DataConfig) -> list[int]:
    """The end of a sequence, and for conversations what ends an assistant's turn in the chat template.

    Raises:
        UserError: the transform is `chat` and its template has no usable end of a turn; or there is no
            such token at all.
    """
    ids = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    if config.transform == "chat" or (":" in config.transform and tokenizer.chat_template):
        try:
            ids.append(end_of_turn(tokenizer, config).token_id)
        except UserError:
            if config.transform == "chat":
                raise
            # A function of the user's own may never use the template; if it does, it meets the same error.
    if not ids:
        raise UserError(
            "no token ends a completion",
            where="model.name_or_path",
            expected="a tokenizer with an `eos_token`, at which generation can stop",
            hint="add one to tokenizer_config.json, or use `data.transform: chat`",
        )
    return list(dict.fromkeys(ids))


def read_stop_token_ids(tokenized: Path) -> list[int]:
    """The ids that the stage `tokenize` recorded in the `data.json` of its output.

    Raises:
        UserError: the data was tokenized for strided mode, or the file cannot be read.
    """
    path = tokenized / "data.json"
    try:
        return [int(token) for token in json.loads(path.read_text(encoding="utf-8"))[_KEY]]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            "the tokenized data names no token that ends a completion",
            where=str(path),
            expected=f"`{_KEY}`, as written for `ebft.mode: structured`",
            hint="tokenize the data again with this run file",
        ) from error
