"""Cutting and packing lose nothing and mix nothing up."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ebft_core.data.document import TokenizedDocument
from ebft_core.data.packing import OPEN_ROWS, Packer, Piece, Row, cut, has_room, join
from ebft_core.rows import row_anchors
from tests.data.builders import run_config

LENGTHS = st.lists(st.integers(1, 20), max_size=60)


def piece(number: int, length: int, prompt: int = 0) -> Piece:
    ids = np.arange(length) + 1000 * number
    target = np.arange(length) >= prompt
    return Piece(TokenizedDocument(ids, np.where(target, ids, -100), target, prompt), f"hash{number}")


def pack(lengths: list[int], limit: int | None) -> list[Row]:
    packer = Packer(limit)
    rows = [row for i, length in enumerate(lengths) for row in packer.add(piece(i, length, length // 3))]
    return [*rows, *packer.flush()]


@given(LENGTHS)
def test_every_document_arrives_whole_and_once(lengths: list[int]) -> None:
    found = {}
    for row in pack(lengths, 20):
        assert len(row) == sum(row.document_lengths) <= 20
        starts = np.cumsum([0, *row.document_lengths])
        for start, length, prompt, key in zip(
            starts, row.document_lengths, row.prompt_lengths, row.document_hashes, strict=False
        ):
            number = int(key.removeprefix("hash"))
            expected = piece(number, lengths[number], prompt).document
            stop = start + length
            assert row.input_ids[start:stop].tolist() == expected.input_ids.tolist()
            assert row.labels[start:stop].tolist() == expected.labels.tolist()
            assert row.is_target[start:stop].tolist() == expected.is_target.tolist()
            assert prompt == lengths[number] // 3
            assert number not in found
            found[number] = length
    assert found == dict(enumerate(lengths))


@given(LENGTHS)
def test_first_fit_leaves_at_most_one_row_half_empty(lengths: list[int]) -> None:
    """The known property of first fit; it holds while no row is given out early."""
    rows = pack(lengths, 20)
    if len(lengths) <= OPEN_ROWS:
        assert sum(len(row) <= 10 for row in rows) <= 1


def test_a_known_case_of_first_fit() -> None:
    assert [row.document_lengths for row in pack([6, 5, 4, 5, 9], 10)] == [[6, 4], [5, 5], [9]]


def test_rows_are_given_out_while_documents_still_come() -> None:
    packer = Packer(10)
    out = [row for i in range(OPEN_ROWS + 3) for row in packer.add(piece(i, 7))]
    assert [row.document_hashes for row in out] == [["hash0"], ["hash1"], ["hash2"]]


def test_without_packing_every_piece_is_a_row() -> None:
    assert [row.document_lengths for row in pack([3, 4, 5], None)] == [[3], [4], [5]]


@given(length=st.integers(1, 50), limit=st.integers(1, 20), prompt=st.integers(0, 50))
def test_cut_pieces_join_to_the_document(length: int, limit: int, prompt: int) -> None:
    document = piece(1, length, min(prompt, length)).document
    pieces = cut(document, limit)
    assert np.concatenate([p.input_ids for p in pieces]).tolist() == document.input_ids.tolist()
    assert [len(p) for p in pieces[:-1]] == [limit] * (len(pieces) - 1)
    assert sum(p.prompt_length for p in pieces) == document.prompt_length


@given(
    targets=st.lists(st.booleans(), min_size=1, max_size=30),
    context=st.integers(1, 10),
    prefix=st.integers(0, 5),
    span=st.integers(1, 8),
)
def test_a_document_has_room_where_stride_one_has_an_anchor(
    targets: list[bool], context: int, prefix: int, span: int
) -> None:
    prompt = targets.index(True) if True in targets else len(targets)
    ids = np.arange(len(targets))
    document = TokenizedDocument(ids, ids, np.array(targets), prompt)
    ebft = {"stride": 1, "context_length": context, "generate_max_len": span, "min_completion_prefix": prefix}
    config = run_config(["stdlib:abc.py"], ebft=ebft)
    anchors = row_anchors(join([Piece(document, "h")]).as_dict(), config)
    assert has_room(document, config.ebft) == (len(anchors) > 0)
