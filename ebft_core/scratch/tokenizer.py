"""Tokenizers for a model made from nothing: one token per byte, or byte-level BPE."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from ebft_core.errors import UserError
from ebft_core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ebft_core.config import FromScratchConfig

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
_SPECIAL = [END_OF_TEXT, PAD]


def make_tokenizer(config: FromScratchConfig, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that `model.from_scratch` asks for; `texts` train the BPE merges.

    Special tokens written out in a text are text: they become ordinary tokens, so that any string
    survives encoding and decoding.

    Raises:
        UserError: the BPE vocabulary is too small to hold every byte and the special tokens.
    """
    from transformers import PreTrainedTokenizerFast

    backend = byte_backend() if config.tokenizer == "byte" else bpe_backend(texts, config.vocab_size)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        model_max_length=config.max_position_embeddings,
    )


def byte_backend() -> Backend:
    """256 tokens, id = byte value, then the special tokens; no merges."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    _byte_level(backend, use_regex=False)
    backend.add_special_tokens(_SPECIAL)
    return backend


def bpe_backend(texts: Iterable[str], vocab_size: int) -> Backend:
    """Byte-level BPE with `vocab_size` tokens, special tokens included, trained on `texts`."""
    smallest = 256 + len(_SPECIAL)
    if vocab_size < smallest:
        raise UserError(
            "the BPE vocabulary cannot hold every byte",
            where="model.from_scratch.vocab_size",
            value=vocab_size,
            expected=f"at least {smallest}",
        )
    backend = Backend(models.BPE())
    _byte_level(backend, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_SPECIAL,
        initial_alphabet=_byte_characters(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def _byte_level(backend: Backend, *, use_regex: bool) -> None:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()


def _byte_characters() -> list[str]:
    """The printable stand-in character of every byte, in byte order, as byte-level tokenizers use them.

    Printable Latin-1 characters stand for themselves; the other bytes are numbered from U+0100 on.
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    shifted = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]
