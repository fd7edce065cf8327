"""Batched encoding with one rule for the special tokens at both ends of a document."""

from __future__ import annotations

from collections.abc import Sequence

from ebft_core.tokenizer import Tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of the texts, nothing added; the fast tokenizer uses all cores for a batch."""
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(
        list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
    ).input_ids
    return ids


def bos_prefix(tokenizer: Tokenizer) -> list[int]:
    """`[bos]` if the tokenizer itself begins sequences with it, else nothing."""
    ids = tokenizer("a", return_attention_mask=False).input_ids
    return [tokenizer.bos_token_id] if ids and ids[0] == tokenizer.bos_token_id else []


def with_bos(ids: list[int], prefix: list[int]) -> list[int]:
    """`ids` behind `prefix`, unless the text spelled the token out already."""
    return ids if prefix and ids[:1] == prefix else prefix + ids


def with_eos(ids: list[int], tokenizer: Tokenizer, append_eos: bool) -> list[int]:
    """`ids` with the end-of-sequence token behind them (once), if wanted."""
    eos = tokenizer.eos_token_id
    return ids if not append_eos or eos is None or ids[-1:] == [eos] else [*ids, eos]
