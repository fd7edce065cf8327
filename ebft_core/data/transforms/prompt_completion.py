"""Transform `prompt_completion`: the prompt is given, the completion is supervised and a target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ebft_core.data.document import IGNORE, Record, RowError, TokenizedDocument, string_field
from ebft_core.data.encoding import bos_prefix, encode, with_bos, with_eos
from ebft_core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ebft_core.config import DataConfig

_PROMPT = ["prompt", "input", "question", "instruction"]
_COMPLETION = ["completion", "output", "answer", "response"]


def columns(config: DataConfig) -> dict[str, list[str]]:
    """Config key -> columns, one of which must exist."""
    fields = config.fields
    return {
        "data.fields.prompt": _PROMPT if fields.prompt is None else [fields.prompt],
        "data.fields.completion": _COMPLETION if fields.completion is None else [fields.completion],
    }


def content(record: Record, config: DataConfig) -> list[Any]:
    """Prompt and completion. Raises RowError for a bad row."""
    return [_field(record, names) for names in columns(config).values()]


def tokenize(
    records: Sequence[Record], tokenizer: Tokenizer, config: DataConfig
) -> list[TokenizedDocument | RowError]:
    """One document per record, truncated to `data.sequence_length`.

    The prompt is encoded by itself, as it is at inference; the completion's tokens continue it. Where
    encoding prompt and completion together gives other tokens at the seam, the completion is encoded by
    itself. Truncation takes tokens off the end of the completion, and off the end of the prompt only to
    keep one completion token.
    """
    prefix = bos_prefix(tokenizer)
    fields = [content(record, config) for record in records]
    pairs = [(prompt + config.prompt_separator, completion) for prompt, completion in fields]
    prompts = encode(tokenizer, [prompt for prompt, _ in pairs])
    completions = _continuations(pairs, prompts, tokenizer)
    documents: list[TokenizedDocument | RowError] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        full = with_eos(completion, tokenizer, config.append_eos)
        documents.append(join(with_bos(prompt, prefix), full, config.sequence_length))
    return documents


def _continuations(
    pairs: Sequence[Sequence[str]], prompts: list[list[int]], tokenizer: Tokenizer
) -> list[list[int]]:
    joined = encode(tokenizer, [prompt + completion for prompt, completion in pairs])
    seams = [len(prompt) for prompt in prompts]
    apart = [i for i, both in enumerate(joined) if both[: seams[i]] != prompts[i]]
    alone = dict(zip(apart, encode(tokenizer, [pairs[i][1] for i in apart]), strict=True))
    return [alone[i] if i in alone else both[seams[i] :] for i, both in enumerate(joined)]


def join(prompt: list[int], completion: list[int], sequence_length: int) -> TokenizedDocument | RowError:
    """Prompt and completion as one document of at most `sequence_length` tokens."""
    if sequence_length < 2:
        return RowError("sequence_length leaves no room for a prompt and one completion token")
    if not completion:
        return RowError("the completion has no tokens")
    kept = prompt[: sequence_length - 1]
    ids = np.asarray((kept + completion)[:sequence_length], dtype=np.int32)
    target = np.arange(len(ids)) >= len(kept)
    return TokenizedDocument(ids, np.where(target, ids, np.int32(IGNORE)), target, len(kept))


def _field(record: Record, names: list[str]) -> str:
    for name in names:
        if name in record:
            return string_field(record, name)
    raise RowError(f"missing field `{names[0]}`" + (f" (or {', '.join(names[1:])})" if names[1:] else ""))
