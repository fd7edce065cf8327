"""Requests from rows, samples turn by turn, groups to blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ebft_core.config import RunConfig
from ebft_core.config.data_section import ChatConfig
from ebft_core.data.structured import ExampleMaker
from ebft_core.data.transforms import get_transform
from ebft_core.samplers.prompts import (
    Conversation,
    Group,
    PromptRequest,
    Sample,
    Turn,
    request_of,
    to_blocks,
)
from tests.data.builders import structured
from tests.data.chats import CHATML, chat_tokenizer, talk


def config_with(**ebft: Any) -> RunConfig:
    config = structured(["unused.jsonl"])
    return config.model_copy(update={"ebft": config.ebft.model_copy(update=ebft)})


def chat_row(*texts: str) -> tuple[dict[str, Any], Any]:
    """The row of a conversation whose assistant turns are all written, and its tokenizer."""
    tokenizer = chat_tokenizer(CHATML)
    chat = ChatConfig(examples="first_turn")
    config = structured(["unused.jsonl"], transform="chat", chat=chat, sequence_length=512)
    maker = ExampleMaker(config, get_transform("chat"), tokenizer)
    ((example,),) = maker.make([{"messages": talk(*texts)}])
    document = example.document
    return {
        "row_id": 7,
        "input_ids": document.input_ids.tolist(),
        "is_target": document.is_target.tolist(),
        "document_lengths": [len(document)],
        "prompt_lengths": [document.prompt_length],
    }, tokenizer


def plain_row(prompt: int, answer: int) -> dict[str, Any]:
    return {
        "row_id": 3,
        "input_ids": list(range(prompt + answer)),
        "is_target": [False] * prompt + [True] * answer,
        "document_lengths": [prompt + answer],
        "prompt_lengths": [prompt],
    }


def test_a_conversation_asks_for_its_turns_with_what_is_given_between_them() -> None:
    row, tokenizer = chat_row("Hi", "Hello", "And?", "More", "Ok", "Bye")
    request = request_of(row, config_with())
    assert tokenizer.decode(request.prompt_ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert [tokenizer.decode(turn.given_ids) for turn in request.turns] == [
        "",
        "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\nOk<|im_end|>\n<|im_start|>assistant\n",
    ]
    assert [turn.reference_length for turn in request.turns] == [len("Hello") + 1, len("More") + 1, 4]
    assert request.row_id == 7


def test_the_ground_truth_written_again_is_the_row() -> None:
    """A sampler that writes the ground truth's turns ends with the row itself."""
    row, _ = chat_row("Hi", "Hello", "And?", "More")
    request = request_of(row, config_with())
    sample = Conversation(request)
    ids = row["input_ids"]
    for _ in request.turns:
        start = len(sample.history)
        reference = request.turns[sample.turn].reference_length
        sample.write(ids[start : start + reference], [-1.0] * reference, ended=True)
    assert sample.history == ids
    finished = sample.finish()
    assert finished.action == row["is_target"][row["prompt_lengths"][0] :]
    assert finished.logprobs == [-1.0 if action else 0.0 for action in finished.action]
    assert (finished.truncated, sample.room) == (False, 0)


@pytest.mark.parametrize(
    ("answer", "ebft", "bound"),
    [
        (10, {}, 64),  # the floor
        (43, {}, 65),  # ceil(64.5)
        (100, {}, 150),
        (300, {}, 256),  # the cap
        (300, {"max_completion_length": 40}, 40),
        (10, {"max_completion_length": 40}, 40),  # the cap beats the floor
        (100, {"gt_length_multiplier": 0.5}, 64),
        (100, {"gt_length_multiplier": 2.0}, 200),
        (10, {"adaptive_max_tokens": False}, 256),
    ],
)
def test_the_bound_follows_the_ground_truth(answer: int, ebft: dict[str, Any], bound: int) -> None:
    assert request_of(plain_row(5, answer), config_with(**ebft)).max_new_tokens == bound


def test_given_tokens_come_on_top_of_the_bound() -> None:
    row, _ = chat_row("Hi", "a" * 59, "?" * 50, "b" * 39)  # 60 and 40 written, with the ends of turn
    request = request_of(row, config_with())
    assert request.max_new_tokens == 150 + len(request.turns[1].given_ids)
    short, _ = chat_row("Hi", "a", "?" * 50, "b")  # the floor is one for what is written
    request = request_of(short, config_with())
    assert request.max_new_tokens == 64 + len(request.turns[1].given_ids)


@pytest.mark.parametrize("is_target", [[False] * 6, [False, False, False, False, True, True]])
def test_a_row_without_a_turn_behind_its_prompt_is_no_request(is_target: list[bool]) -> None:
    row = {**plain_row(3, 3), "is_target": is_target}
    with pytest.raises(ValueError, match="row 3 has no prompt with a turn right behind it"):
        request_of(row, config_with())


def test_a_turn_that_does_not_end_ends_the_sample() -> None:
    sample = Conversation(PromptRequest(0, [1], [Turn([], 2), Turn([8], 2)], 5))
    sample.write([2, 3, 4, 5, 6], [-1.0] * 5, ended=False)
    assert sample.finish() == Sample([2, 3, 4, 5, 6], [True] * 5, [-1.0] * 5, True)


@pytest.mark.parametrize(("bound", "given", "truncated"), [(5, [8, 8], False), (4, [], True)])
def test_given_tokens_are_inserted_only_where_a_token_has_room_behind_them(
    bound: int, given: list[int], truncated: bool
) -> None:
    sample = Conversation(PromptRequest(0, [1], [Turn([], 2), Turn([8, 8], 2)], bound))
    sample.write([2, 9], [-1.0, -1.0], ended=True)
    assert sample.token_ids == [2, 9, *given]
    assert (sample.truncated, sample.room) == (truncated, 0 if truncated else 1)


def test_groups_become_padded_blocks() -> None:
    long = Sample([5, 6, 7], [True, False, True], [-0.5, 0.0, -0.25], True)
    short = Sample([4], [True], [-2.0], False)
    groups = [Group(0, [long, None]), Group(1, [short, short])]
    blocks = to_blocks(groups, torch.tensor([[3], [9]]), pad=99, version=12)
    assert blocks.tokens_RANG.tolist() == [[[[5, 6, 7], [99] * 3]], [[[4, 99, 99], [4, 99, 99]]]]
    assert blocks.length_RAN.tolist() == [[[3, 0]], [[1, 1]]]
    assert blocks.action_RANG.tolist() == [
        [[[True, False, True], [False] * 3]],
        [[[True, False, False], [True, False, False]]],
    ]
    assert blocks.truncated_RAN is not None
    assert blocks.truncated_RAN.tolist() == [[[True, False]], [[False, False]]]
    assert blocks.sampler_logprob_RANG is not None
    assert blocks.sampler_logprob_RANG.tolist() == [
        [[[-0.5, 0.0, -0.25], [0.0] * 3]],
        [[[-2.0, 0.0, 0.0], [-2.0, 0.0, 0.0]]],
    ]
    assert (blocks.weight_version, blocks.tokens_RANG.dtype) == (12, torch.int64)


def test_unknown_log_probabilities_stay_unknown() -> None:
    groups = [Group(0, [Sample([1], [True], [-1.0], False), Sample([1], [True], None, False)])]
    assert to_blocks(groups, torch.tensor([[1]]), pad=0).sampler_logprob_RANG is None


def test_a_batch_of_failures_is_a_batch() -> None:
    blocks = to_blocks([Group(0, [None, None])], torch.tensor([[4]]), pad=0)
    assert blocks.tokens_RANG.shape == (1, 1, 2, 1)
    assert blocks.action_count == 0


@pytest.mark.parametrize(
    ("groups", "anchors"),
    [([Group(0, [None])], [[1], [2]]), ([Group(0, [None]), Group(1, [None, None])], [[1], [2]])],
)
def test_groups_that_do_not_fit_are_refused(groups: list[Group], anchors: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="do not fit anchors"):
        to_blocks(groups, torch.tensor(anchors), pad=0)
