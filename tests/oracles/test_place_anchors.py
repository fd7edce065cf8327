"""Anchors: the formula of the design (section 2), first by hand, then over random settings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebft_core import place_anchors


@pytest.mark.parametrize(
    ("length", "settings", "expected"),
    [
        (24, dict(stride=8, context_length=8, generate_max_len=8), [8, 16]),
        (23, dict(stride=8, context_length=8, generate_max_len=8), [8]),
        (16, dict(stride=8, context_length=8, generate_max_len=8), [8]),
        (15, dict(stride=8, context_length=8, generate_max_len=8), []),
        (1, dict(stride=8, context_length=8, generate_max_len=8), []),
        (0, dict(stride=1, context_length=1, generate_max_len=1), []),
        (2, dict(stride=1, context_length=1, generate_max_len=1), [1]),
        (10, dict(stride=3, context_length=2, generate_max_len=1), [2, 5, 8]),
        (10, dict(stride=100, context_length=1, generate_max_len=9), [1]),
        # prompt_length + min_completion_prefix takes over from context_length when it is larger
        (20, dict(stride=4, context_length=4, generate_max_len=2, prompt_length=7), [7, 11, 15]),
        (
            20,
            dict(stride=4, context_length=4, generate_max_len=2, prompt_length=7, min_completion_prefix=3),
            [10, 14, 18],
        ),
        (20, dict(stride=4, context_length=12, generate_max_len=2, prompt_length=7), [12, 16]),
        (20, dict(stride=4, context_length=4, generate_max_len=2, prompt_length=19), []),
        (20, dict(stride=4, context_length=4, generate_max_len=2, prompt_length=18), [18]),
    ],
)
def test_by_hand(length: int, settings: dict[str, int], expected: list[int]) -> None:
    anchors_A = place_anchors(length, **settings)
    assert anchors_A.tolist() == expected
    assert anchors_A.dtype == torch.int64
    assert anchors_A.shape == (len(expected),)


def test_paper_setting() -> None:
    """L = 1024, G = 8, stride 8 from 8: 127 anchors (the count quoted in the design)."""
    assert len(place_anchors(1024, stride=8, context_length=8, generate_max_len=8)) == 127


@given(
    length=st.integers(0, 200),
    stride=st.integers(1, 40),
    context_length=st.integers(1, 40),
    generate_max_len=st.integers(1, 40),
    prompt_length=st.integers(0, 60),
    prefix=st.integers(0, 20),
)
def test_formula(
    length: int, stride: int, context_length: int, generate_max_len: int, prompt_length: int, prefix: int
) -> None:
    anchors = place_anchors(
        length,
        stride=stride,
        context_length=context_length,
        generate_max_len=generate_max_len,
        prompt_length=prompt_length,
        min_completion_prefix=prefix,
    ).tolist()
    first = max(context_length, prompt_length + prefix)
    # Brute force: every position of the grid whose whole target is made of real tokens.
    assert anchors == [
        a
        for a in range(length)
        if a >= first and (a - first) % stride == 0 and a + generate_max_len <= length
    ]
