"""Rows to tensors: anchors in packed rows, targets that must be left alone, random numbers of a row."""

from __future__ import annotations

import torch

from ebft_core.rows import collate_rows, row_anchors, row_uniforms
from tests.trainer_fixtures import make_config


def _row(lengths: list[int], prompts: list[int], not_target: tuple[int, ...] = (), row_id: int = 0) -> dict:
    total = sum(lengths)
    return {
        "row_id": row_id,
        "input_ids": list(range(1, total + 1)),
        "labels": list(range(1, total + 1)),
        "is_target": [i not in not_target for i in range(total)],
        "document_lengths": lengths,
        "prompt_lengths": prompts,
    }


def test_each_packed_document_has_its_own_anchors() -> None:
    config = make_config()  # stride 4, context 4, generate 4
    row = _row([13, 8, 5], [0, 5, 0])
    # Document 0: 4, 8 (12 would need token 16). Document 1 starts at 13: its prompt of 5 leaves 3 tokens.
    assert row_anchors(row, config).tolist() == [4, 8]
    assert row_anchors(_row([13, 10], [0, 5]), config).tolist() == [4, 8, 18]


def test_without_document_masking_a_row_is_one_document() -> None:
    config = make_config(ebft={"document_masking": False})
    assert row_anchors(_row([13, 10], [0, 5]), config).tolist() == [4, 8, 12, 16]
    assert collate_rows([_row([13, 10], [0, 5])], config, 0).document_ids_RL is None


def test_blocks_that_touch_a_users_turn_are_left_out() -> None:
    config = make_config()
    assert row_anchors(_row([24], [0]), config).tolist() == [4, 8, 12, 16, 20]
    assert row_anchors(_row([24], [0], not_target=(11, 12)), config).tolist() == [4, 16, 20]
    assert row_anchors(_row([24], [0], not_target=(0, 1, 2, 3)), config).tolist() == [4, 8, 12, 16, 20]


def test_collation_pads_and_marks() -> None:
    config = make_config()
    batch = collate_rows(
        [_row([13, 10], [0, 5], row_id=7), _row([9], [0], row_id=3)], config, pad_token_id=99
    )
    assert batch.input_ids_RL[1].tolist() == [*range(1, 10), *[99] * 14]
    assert batch.labels_RL[1, 9:].eq(-100).all()
    assert batch.document_ids_RL[0].tolist() == [0] * 13 + [1] * 10
    assert batch.document_ids_RL[1].tolist() == [0] * 9 + [-1] * 14
    assert batch.anchors_RA.tolist() == [[4, 8, 18], [4, -1, -1]]
    assert batch.row_ids_R.tolist() == [7, 3]
    assert batch.num_groups == 4


def test_random_numbers_belong_to_a_row_and_a_step() -> None:
    together = row_uniforms([3, 8], seed=1, step=5, shape=(4, 2, 3))
    alone = row_uniforms([8], seed=1, step=5, shape=(4, 2, 3))
    assert torch.equal(together[1], alone[0])
    # A wider batch pads with more anchors; the row's own numbers must not move.
    assert torch.equal(row_uniforms([8], seed=1, step=5, shape=(40, 2, 3))[:, :4], alone)
    for other in (
        row_uniforms([9], seed=1, step=5, shape=(4, 2, 3)),
        row_uniforms([8], seed=2, step=5, shape=(4, 2, 3)),
        row_uniforms([8], seed=1, step=6, shape=(4, 2, 3)),
    ):
        assert not torch.equal(other, alone)
    many = row_uniforms(range(200), seed=0, step=0, shape=(50, 4, 8))
    assert abs(float(many.mean()) - 0.5) < 0.002
    assert float(many.min()) >= 0.0
    assert float(many.max()) < 1.0
    # Neighbouring rows are unrelated.
    correlation = torch.corrcoef(many.flatten(1))
    assert correlation.fill_diagonal_(0).abs().max() < 0.12
