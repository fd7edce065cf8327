"""The split depends on each document alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebft_core.data.document import content_hash
from ebft_core.data.split import check_split, is_heldout
from ebft_core.errors import UserError

TEXTS = st.lists(st.text(min_size=1), min_size=1, unique=True)
FRACTIONS = st.floats(0.01, 0.99)


def heldout(texts: list[str], fraction: float) -> set[str]:
    return {text for text in texts if is_heldout(content_hash([text]), fraction)}


@given(TEXTS, TEXTS, FRACTIONS)
def test_adding_documents_moves_no_old_one(old: list[str], new: list[str], fraction: float) -> None:
    assert heldout([*new, *old], fraction) & set(old) == heldout(old, fraction)


@given(TEXTS, FRACTIONS, FRACTIONS)
def test_a_larger_share_only_adds(texts: list[str], one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert heldout(texts, small) <= heldout(texts, large)


def test_the_share_is_met() -> None:
    texts = [f"document {i}" for i in range(20_000)]
    assert len(heldout(texts, 0.1)) / len(texts) == pytest.approx(0.1, abs=4 * (0.1 * 0.9 / 20_000) ** 0.5)


def test_membership_never_changes_between_versions() -> None:
    """Frozen values: a changed salt or hash would move the held-out documents of existing users."""
    assert content_hash(["document 3"]) == "366b54306f02a68357172d40f60d6db2"
    assert sorted(heldout([f"document {i}" for i in range(30)], 0.1)) == ["document 0", "document 15"]


@pytest.mark.parametrize(("fraction", "side"), [(1e-9, "held-out"), (1 - 1e-9, "training")])
def test_an_empty_side_is_named(fraction: float, side: str) -> None:
    with pytest.raises(UserError, match=f"no document falls into the {side} part"):
        check_split([content_hash([str(i)]) for i in range(5)], fraction)


def test_copies_of_one_document_cannot_be_split() -> None:
    with pytest.raises(UserError, match="no document falls"):
        check_split([content_hash(["same"])] * 100, 0.5)
