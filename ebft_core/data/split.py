"""Training or held-out: decided by each document's own hash, so that new data moves no old document."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from ebft_core.errors import UserError

_SALT = b"ebft-heldout-1:"
"""Keeps this decision independent of other uses of the same hashes. A change would move documents."""


def is_heldout(document_hash: str, fraction: float) -> bool:
    """Whether a document is kept for evaluation. Raising `fraction` only ever adds documents."""
    digest = hashlib.sha256(_SALT + document_hash.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def check_split(document_hashes: Iterable[str], fraction: float, *, heldout_needed: bool = True) -> None:
    """Refuse a split that leaves one side without documents.

    Args:
        heldout_needed: False where models are judged on held-out rows from elsewhere (`evaluate.heldout`).

    Raises:
        UserError: saying which side is empty.
    """
    distinct = set(document_hashes)
    heldout = sum(is_heldout(document_hash, fraction) for document_hash in distinct)
    if 0 < heldout < len(distinct) or not (heldout or heldout_needed):
        return
    side = "training" if heldout else "held-out"
    raise UserError(
        f"no document falls into the {side} part",
        where="data.heldout_fraction",
        value=fraction,
        expected=f"a share that leaves documents on both sides of {len(distinct)} distinct document(s)",
        hint="add documents or change the share; membership is decided by each document's content",
    )
