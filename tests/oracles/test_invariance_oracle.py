"""Oracle 6: micro-batch split, accumulation, row order and padding change neither loss nor gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ebft_core.rows import collate_rows
from ebft_core.trainers.update import BatchCounts

from .slow_path import assert_same_gradients
from .steps import (
    Step,
    count_batch,
    dataset_row,
    lora_policy,
    make_config,
    packed_rows,
    recorded,
    reference_step,
    run_step,
    single_rows,
    update,
)


def assert_same_step(actual: Step, expected: Step) -> None:
    assert actual.tokens.keys() == expected.tokens.keys()
    for row_id, tokens in expected.tokens.items():
        assert torch.equal(actual.tokens[row_id], tokens), f"rollouts of row {row_id}"
        torch.testing.assert_close(actual.advantages[row_id], expected.advantages[row_id], atol=1e-4, rtol=0)
    assert actual.loss == pytest.approx(expected.loss, rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(actual.parts, expected.parts, rtol=1e-4, atol=1e-6)
    assert_same_gradients(actual.gradient, expected.gradient)


@pytest.mark.parametrize(
    "split",
    [
        [[0, 1], [2, 3, 4]],
        [[0], [1], [2], [3], [4]],  # row 3 alone: a micro-batch without any anchor
        [[4, 2, 0, 3, 1]],
        [[3, 2], [4, 1, 0]],
    ],
)
def test_split_and_order_of_rows(split: list[list[int]]) -> None:
    whole = reference_step(packed=False)
    assert sum(len(t) for t in whole.tokens.values()) > 10
    assert max(a.abs().max().item() for a in whole.advantages.values() if a.numel()) > 0.1
    assert_same_step(run_step(lora_policy(), single_rows(), split, make_config()), whole)


@pytest.mark.parametrize("split", [[[0], [1], [2], [3]], [[3, 1], [2, 0]]])
def test_split_and_order_of_packed_rows(split: list[list[int]]) -> None:
    assert_same_step(
        run_step(lora_policy(), packed_rows(), split, make_config()), reference_step(packed=True)
    )


@pytest.mark.parametrize("packed", [False, True])
def test_padding_token_does_not_matter(packed: bool) -> None:
    rows = packed_rows() if packed else single_rows()
    step = run_step(lora_policy(), rows, [range(len(rows))], make_config(), pad=13)
    assert_same_step(step, reference_step(packed))


def test_a_longer_neighbour_does_not_matter() -> None:
    """Without losses of its own, a long row only adds padding to the others."""
    rows = single_rows()
    config = make_config(ce_coef=0.0)
    alone = run_step(lora_policy(), rows[:2], [[0, 1]], config)
    silent = dataset_row(9, [60], [60])  # all prompt: no anchor, no label
    assert_same_step(_without(run_step(lora_policy(), [*rows[:2], silent], [[0, 1, 2]], config), 9), alone)


def _without(step: Step, row_id: int) -> Step:
    tokens = {k: v for k, v in step.tokens.items() if k != row_id}
    advantages = {k: v for k, v in step.advantages.items() if k != row_id}
    return Step(tokens, advantages, step.loss, step.parts, step.gradient)


def test_accumulated_backward_passes_add_up() -> None:
    """Updates of all micro-batches add up to the whole batch's gradient, however small their parts are."""
    policy, rows, config = lora_policy(), single_rows(), make_config()
    whole = reference_step(packed=False)
    batches = [collate_rows([rows[i] for i in part], config, 0) for part in ([0, 3], [1, 2], [4])]
    counts = sum((count_batch(b, config.ebft) for b in batches), start=BatchCounts(0, 0))
    for max_tokens in (1, 7, None):
        gradient: dict[str, torch.Tensor] = {}
        for batch in batches:
            tokens, advantage = recorded(whole, batch)
            _, part = update(policy, batch, tokens, advantage, config.ebft, counts, max_tokens=max_tokens)
            gradient = {name: gradient.get(name, 0) + value for name, value in part.items()}
        assert_same_gradients(gradient, whole.gradient)


def test_row_anchors_avoid_boundaries_and_prompts() -> None:
    """Anchors of packed rows by brute force, document by document."""
    config = make_config()
    stride, context, length = config.ebft.stride, config.ebft.context_length, config.ebft.generate_max_len
    rows = [*packed_rows(), *single_rows(), dataset_row(7, [30], [1])]
    rows[-1]["is_target"][11:14] = [False] * 3  # a user's turn in the middle of a chat
    anchors_RA = collate_rows(rows, config, 0, row_ids=list(range(len(rows)))).anchors_RA
    for row, anchors_A in zip(rows, anchors_RA, strict=True):
        expected, start = [], 0
        for size, prompt in zip(row["document_lengths"], row["prompt_lengths"], strict=True):
            first = max(context, prompt)
            for a in range(first, size - length + 1, stride):
                if all(row["is_target"][start + a : start + a + length]):
                    expected.append(start + a)
            start += size
        assert anchors_A[anchors_A >= 0].tolist() == expected
