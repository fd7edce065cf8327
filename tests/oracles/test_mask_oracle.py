"""Oracle 5: the mask rule against grids drawn by hand, and its two views against each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from ebft_core.geometry import PackedLayout, pack_layout
from ebft_core.masks import dense_mask, mask_mod

# Rows are queries, columns are keys; `x` is visible. Names: d = document token, 1a = block at the first
# anchor, sample a.

# L = 4, anchors at 1 and 2, N = 2, G = 2: T = 4 + 2·2·2 = 12.
TWO_ANCHORS = """
    d0 d1 d2 d3 | 1a 1a | 1b 1b | 2a 2a | 2b 2b
d0   x  .  .  . |  .  . |  .  . |  .  . |  .  .
d1   x  x  .  . |  .  . |  .  . |  .  . |  .  .
d2   x  x  x  . |  .  . |  .  . |  .  . |  .  .
d3   x  x  x  x |  .  . |  .  . |  .  . |  .  .
1a   x  .  .  . |  x  . |  .  . |  .  . |  .  .
1a   x  .  .  . |  x  x |  .  . |  .  . |  .  .
1b   x  .  .  . |  .  . |  x  . |  .  . |  .  .
1b   x  .  .  . |  .  . |  x  x |  .  . |  .  .
2a   x  x  .  . |  .  . |  .  . |  x  . |  .  .
2a   x  x  .  . |  .  . |  .  . |  x  x |  .  .
2b   x  x  .  . |  .  . |  .  . |  .  . |  x  .
2b   x  x  .  . |  .  . |  .  . |  .  . |  x  x
"""
TWO_ANCHORS_POSITIONS = [0, 1, 2, 3, 1, 2, 1, 2, 2, 3, 2, 3]

# Two documents (3 + 3 tokens) in one row, anchors at 2 (first document) and 4 (second), N = 3, G = 1.
TWO_DOCUMENTS = """
    d0 d1 d2 | e0 e1 e2 | 1a | 1b | 1c | 2a | 2b | 2c
d0   x  .  . |  .  .  . |  . |  . |  . |  . |  . |  .
d1   x  x  . |  .  .  . |  . |  . |  . |  . |  . |  .
d2   x  x  x |  .  .  . |  . |  . |  . |  . |  . |  .
e0   .  .  . |  x  .  . |  . |  . |  . |  . |  . |  .
e1   .  .  . |  x  x  . |  . |  . |  . |  . |  . |  .
e2   .  .  . |  x  x  x |  . |  . |  . |  . |  . |  .
1a   x  x  . |  .  .  . |  x |  . |  . |  . |  . |  .
1b   x  x  . |  .  .  . |  . |  x |  . |  . |  . |  .
1c   x  x  . |  .  .  . |  . |  . |  x |  . |  . |  .
2a   .  .  . |  x  .  . |  . |  . |  . |  x |  . |  .
2b   .  .  . |  x  .  . |  . |  . |  . |  . |  x |  .
2c   .  .  . |  x  .  . |  . |  . |  . |  . |  . |  x
"""
TWO_DOCUMENTS_POSITIONS = [0, 1, 2, 0, 1, 2, 2, 2, 2, 1, 1, 1]

# Structured mode: a prompt of 3 tokens (p), its ground truth of 3 (t), two completions of 3.
PROMPT_AND_COMPLETION = """
    p0 p1 p2 t0 t1 t2 | 1a 1a 1a | 1b 1b 1b
p0   x  .  .  .  .  . |  .  .  . |  .  .  .
p1   x  x  .  .  .  . |  .  .  . |  .  .  .
p2   x  x  x  .  .  . |  .  .  . |  .  .  .
t0   x  x  x  x  .  . |  .  .  . |  .  .  .
t1   x  x  x  x  x  . |  .  .  . |  .  .  .
t2   x  x  x  x  x  x |  .  .  . |  .  .  .
1a   x  x  x  .  .  . |  x  .  . |  .  .  .
1a   x  x  x  .  .  . |  x  x  . |  .  .  .
1a   x  x  x  .  .  . |  x  x  x |  .  .  .
1b   x  x  x  .  .  . |  .  .  . |  x  .  .
1b   x  x  x  .  .  . |  .  .  . |  x  x  .
1b   x  x  x  .  .  . |  .  .  . |  x  x  x
"""
PROMPT_AND_COMPLETION_POSITIONS = [0, 1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 5]


def _parse(drawing: str) -> Tensor:
    lines = drawing.strip("\n").splitlines()[1:]
    grid = [[cell == "x" for cell in line.replace("|", " ").split()[1:]] for line in lines]
    assert len(grid) == 12
    assert {len(row) for row in grid} == {12}
    return torch.tensor(grid)


def _layout(name: str) -> PackedLayout:
    if name == "two_anchors":
        return pack_layout(torch.tensor([[1, 2]]), 2, 2, 4)
    if name == "two_documents":
        return pack_layout(torch.tensor([[2, 4]]), 3, 1, 6, torch.tensor([[0, 0, 0, 1, 1, 1]]))
    return pack_layout(torch.tensor([[3]]), 2, 3, 6)


DRAWINGS = {
    "two_anchors": (TWO_ANCHORS, TWO_ANCHORS_POSITIONS),
    "two_documents": (TWO_DOCUMENTS, TWO_DOCUMENTS_POSITIONS),
    "prompt_and_completion": (PROMPT_AND_COMPLETION, PROMPT_AND_COMPLETION_POSITIONS),
}


def _dense(layout: PackedLayout) -> Tensor:
    mask = dense_mask(layout)
    assert mask.dtype == torch.bool
    return mask[:, 0]


@pytest.mark.parametrize("name", DRAWINGS)
def test_hand_drawn_grid(name: str) -> None:
    drawing, positions = DRAWINGS[name]
    layout = _layout(name)
    assert torch.equal(_dense(layout)[0], _parse(drawing))
    assert layout.position_RT[0].tolist() == positions


def _brute_force(layout_args: tuple, row: int) -> Tensor:
    """The three sentences of the rule in nested loops; False wherever padding is involved."""
    anchors_RA, n_samples, block_length, length, document_ids_RL = layout_args
    anchors, documents = anchors_RA[row].tolist(), document_ids_RL[row].tolist()
    total = length + len(anchors) * n_samples * block_length
    grid = torch.zeros(total, total, dtype=torch.bool)
    for i in range(length):
        for k in range(i + 1):
            grid[i, k] = documents[i] == documents[k] != -1
    index = length
    for anchor in anchors:
        for _ in range(n_samples):
            for s in range(block_length):
                query = index + s
                if anchor >= 0:
                    for k in range(anchor):
                        grid[query, k] = documents[k] == documents[anchor]
                    grid[query, index : query + 1] = True
            index += block_length
    return grid


def _batch() -> tuple:
    """Two rows: three documents with three anchors; one padded document with one anchor."""
    anchors_RA = torch.tensor([[2, 6, 10], [3, -1, -1]])
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], [0] * 7 + [-1] * 5])
    return anchors_RA, 2, 2, 12, documents


def test_batch_equals_nested_loops() -> None:
    args = _batch()
    dense = _dense(pack_layout(*args))
    for row in range(2):
        expected = _brute_force(args, row)
        real = expected.any(dim=1)  # padding queries are free to see anything: nobody reads them
        assert torch.equal(dense[row][real], expected[real])


@pytest.mark.parametrize("name", [*DRAWINGS, "batch"])
def test_block_mask_predicate_is_the_same_rule(name: str) -> None:
    layout = pack_layout(*_batch()) if name == "batch" else _layout(name)
    rows, total = layout.position_RT.shape
    dense = dense_mask(layout)
    rule = mask_mod(layout)
    assert torch.equal(create_mask(rule, rows, 1, total, total, device="cpu"), dense)
    # The block structure must not skip a block in which something is visible, nor fill a mixed one.
    blocks = create_block_mask(rule, rows, 1, total, total, device="cpu", BLOCK_SIZE=4)
    padded = torch.zeros(rows, 1, -(-total // 4) * 4, -(-total // 4) * 4, dtype=torch.bool)
    padded[..., :total, :total] = dense
    tiles = padded.unflatten(-1, (-1, 4)).unflatten(-3, (-1, 4))
    assert torch.equal(blocks.to_dense().bool(), tiles.any(dim=-1).any(dim=-2))


def test_structured_mode_is_strided_mode_with_one_anchor() -> None:
    """Cutting one anchor's blocks out of a strided row gives the structured row of that prompt."""
    anchors = [2, 5, 6]
    n_samples, block_length, length = 2, 3, 10
    strided = pack_layout(torch.tensor([anchors]), n_samples, block_length, length)
    for slot, anchor in enumerate(anchors):
        structured = pack_layout(torch.tensor([[anchor]]), n_samples, block_length, length)
        start = length + slot * n_samples * block_length
        keep = torch.cat([torch.arange(length), torch.arange(start, start + n_samples * block_length)])
        assert torch.equal(_dense(strided)[0][keep][:, keep], _dense(structured)[0])
        assert torch.equal(strided.position_RT[0, keep], structured.position_RT[0])
        others = torch.ones(strided.position_RT.shape[1], dtype=torch.bool)
        others[keep] = False
        assert not _dense(strided)[0][keep][:, others].any(), "a block saw another anchor's block"
