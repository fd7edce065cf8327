"""Transform `prompt_completion`: the prompt is given, the completion is supervised and a target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ebft_core.data.document import IGNORE, Record, RowError, TokenizedDocument, string_field
from ebft_core.data.encoding import bos_prefix, encode, with_bos, with_eos
from ebft_core.data.thinking import without_thinking
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
    """Prompt and completion as they stand. Raises RowError for a bad row."""
    prompt, completion = (_field(record, names) for names in columns(config).values())
    check_answer(completion, config)
    return [prompt, completion]


def tokenize(
    records: Sequence[Record], tokenizer: Tokenizer, config: DataConfig
) -> list[TokenizedDocument | RowError]:
    """One document per record, truncated to `data.sequence_length`.

    Truncation takes tokens off the end of the completion, and off the end of the prompt only to keep one
    completion token.
    """
    pairs = encode_pairs([content(record, config) for record in records], tokenizer, config)
    return [join(prompt, completion, config.sequence_length) for prompt, completion in pairs]


def examples(
    records: Sequence[Record], tokenizer: Tokenizer, config: DataConfig
) -> list[list[TokenizedDocument] | RowError]:
    """One structured example per record, whole whatever its length."""
    return plain_examples([content(record, config) for record in records], tokenizer, config)


def plain_examples(
    pairs: Sequence[Sequence[str]], tokenizer: Tokenizer, config: DataConfig
) -> list[list[TokenizedDocument] | RowError]:
    """Structured examples of (prompt, ground truth) texts that are in no chat template."""
    made: list[list[TokenizedDocument] | RowError] = []
    for prompt, completion in encode_pairs(pairs, tokenizer, config):
        if not prompt:
            made.append(RowError("the prompt has no tokens"))
            continue
        document = join(prompt, completion, len(prompt) + len(completion))
        made.append(document if isinstance(document, RowError) else [document])
    return made


def encode_pairs(
    texts: Sequence[Sequence[str]], tokenizer: Tokenizer, config: DataConfig
) -> list[tuple[list[int], list[int]]]:
    """Token ids of prompts and completions, with the special tokens at both ends.

    The prompt is encoded by itself, as it is at inference; the completion's tokens continue it. Where
    encoding prompt and completion together gives other tokens at the seam, the completion is encoded by
    itself.
    """
    prefix = bos_prefix(tokenizer)
    pairs = [(prompt + config.prompt_separator, _answer(said, config)) for prompt, said in texts]
    prompts = encode(tokenizer, [prompt for prompt, _ in pairs])
    completions = _continuations(pairs, prompts, tokenizer)
    return [
        (with_bos(prompt, prefix), with_eos(completion, tokenizer, config.append_eos))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def check_answer(completion: str, config: DataConfig) -> None:
    """Refuse, before anything is tokenized, a completion of which `data.thinking` leaves nothing.

    Raises:
        RowError: with the reason.
    """
    _answer(completion, config)


def _answer(completion: str, config: DataConfig) -> str:
    return without_thinking(completion) if config.thinking == "answer_only" else completion


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
