"""Loading a tokenizer from a model's folder, and the checks that make it usable here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebft_core.errors import UserError
from ebft_core.manifests import digest_json

if TYPE_CHECKING:
    from ebft_core.config import ModelConfig

Tokenizer = Any
"""A fast `transformers` tokenizer (`PreTrainedTokenizerFast`); transformers ships no types."""


def load_tokenizer(path: Path, model: ModelConfig) -> Tokenizer:
    """The tokenizer in folder `path`, with the configured chat template and a padding token.

    A tokenizer without a padding token pads with its end-of-sequence token.

    Raises:
        UserError: no tokenizer that loads, a slow one (it has no character offsets), neither a padding nor
            an end-of-sequence token, or the chat template cannot be read.
    """
    tokenizer = _load(path, model.trust_remote_code)
    if not tokenizer.is_fast:
        raise UserError(
            "the tokenizer has no fast version",
            where=str(path),
            value=type(tokenizer).__name__,
            expected="a folder with tokenizer.json",
        )
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise UserError(
                "the tokenizer has no padding token and no end-of-sequence token to use instead",
                where=str(path / "tokenizer_config.json"),
                expected="`pad_token` or `eos_token`",
            )
        tokenizer.pad_token = tokenizer.eos_token
    return use_chat_template(tokenizer, model)


def use_chat_template(tokenizer: Tokenizer, model: ModelConfig) -> Tokenizer:
    """The tokenizer with `model.chat_template` in place of its own template, if that is set."""
    if model.chat_template is not None:
        tokenizer.chat_template = read_chat_template(model.chat_template)
    return tokenizer


def read_chat_template(path: str) -> str:
    """The text of a Jinja chat template. Raises UserError if it cannot be read."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "cannot read the chat template",
            where="model.chat_template",
            value=path,
            expected="a Jinja file in UTF-8",
            hint=str(error),
        ) from error


def check_token_ids(tokenizer: Tokenizer, embedding_size: int, *, where: str) -> None:
    """Refuse a tokenizer that can produce ids which the model has no embedding for.

    Raises:
        UserError: naming the first such token.
    """
    beyond = sorted((i, token) for token, i in tokenizer.get_vocab().items() if i >= embedding_size)
    if beyond:
        index, token = beyond[0]
        raise UserError(
            f"the tokenizer has {len(beyond)} token(s) beyond the model's embedding",
            where=where,
            value=f"{token} = {index}",
            expected=f"ids below {embedding_size}",
            hint="use the tokenizer the model was trained with, or resize the model's embeddings",
        )


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """Hex sha256 of what each token id stands for: rows can be shared by models that agree on it."""
    return digest_json(sorted(tokenizer.get_vocab().items()))


def _load(path: Path, trust_remote_code: bool) -> Tokenizer:
    from transformers import AutoTokenizer

    if not any(
        (path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    ):
        raise UserError(
            "the model's folder has no tokenizer",
            where=str(path),
            expected="tokenizer.json and tokenizer_config.json",
        )
    try:
        return AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # the Rust tokenizer raises plain `Exception`
        raise UserError("the tokenizer does not load", where=str(path), hint=str(error)[:300]) from error
