"""Transforms of the user's own: `data.transform: module:function`.

The function has the signature
`transform(record: Mapping[str, Any], tokenizer, config: DataConfig) -> TokenizedDocument`
and raises `RowError` for a record that it cannot use. What it may return in structured mode stands in
`custom_examples.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ebft_core.data.document import Record, RowError, TokenizedDocument
from ebft_core.errors import UserError
from ebft_core.manifests import sha256_file
from ebft_core.tokenizer import Tokenizer
from ebft_core.user_code import import_function, module_file

if TYPE_CHECKING:
    from ebft_core.config import DataConfig

RowFunction = Callable[[Record, Tokenizer, "DataConfig"], object]

KEY = "data.transform"
_SIGNATURE = "function(record, tokenizer, config) -> TokenizedDocument"
_EXPECTED = "text, prompt_completion, chat, or an importable `module:function`"


def fingerprint_transform(name: str) -> str | None:
    """Digest of the file that holds a `module:function` transform; None for a built-in name.

    Raises:
        UserError: there is no such module.
    """
    if ":" not in name:
        return None
    return sha256_file(module_file(name.partition(":")[0], where=KEY, expected=_EXPECTED))


def load_function(name: str) -> RowFunction:
    """Import `module:function` and check that it takes (record, tokenizer, config).

    Raises:
        UserError: no such module or function, an error while importing it, or another signature.
    """
    function = import_function(name, what="transform", where=KEY, expected=_EXPECTED, signature=_SIGNATURE)
    _check_signature(function, name)
    return function


def content(record: Record, config: DataConfig) -> list[Any]:
    """The whole record: a transform of the user's own may read any column."""
    return [dict(record)]


def tokenizer_for(name: str) -> Callable[..., list[TokenizedDocument | RowError]]:
    """The batch function of a `module:function` transform."""
    function = load_function(name)

    def tokenize(
        records: Sequence[Record], tokenizer: Tokenizer, config: DataConfig
    ) -> list[TokenizedDocument | RowError]:
        return [_document(call(function, record, tokenizer, config, name), name) for record in records]

    return tokenize


def call(
    function: RowFunction, record: Record, tokenizer: Tokenizer, config: DataConfig, name: str
) -> object:
    """What the function returns for the record, or the RowError that it raises.

    Raises:
        UserError: it fails in another way.
    """
    try:
        return function(record, tokenizer, config)
    except RowError as error:
        return error
    except Exception as error:  # the traceback goes to the log with the cause
        raise UserError(
            "the transform failed",
            where=KEY,
            value=name,
            hint=f"{type(error).__name__}: {error}; raise RowError for a record to be reported and left out",
        ) from error


def _document(result: object, name: str) -> TokenizedDocument | RowError:
    if not isinstance(result, TokenizedDocument | RowError):
        raise UserError(
            f"the transform returned {type(result).__name__}",
            where=KEY,
            value=name,
            expected=_SIGNATURE,
            hint="other results are for `ebft.mode: structured`" if isinstance(result, dict | list) else None,
        )
    return result


def _check_signature(function: Callable[..., Any], name: str) -> None:
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    extra_required = [p for p in parameters if p not in positional[:3] and _is_required(p)]
    if len(positional) < 3 or extra_required:
        raise UserError(
            "the transform takes other arguments",
            where=KEY,
            value=f"{name}{inspect.signature(function)}",
            expected=_SIGNATURE,
        )


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return not variadic and parameter.default is parameter.empty
