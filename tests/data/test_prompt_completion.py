"""Prompt and completion: labels, the seam, truncation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ebft_core.config.data_section import FieldMapping
from ebft_core.data.document import RowError, TokenizedDocument
from ebft_core.data.transforms import get_transform
from ebft_core.data.transforms.prompt_completion import join
from tests.data.builders import byte_tokenizer, data_config, word_tokenizer

TRANSFORM = get_transform("prompt_completion")


def one(record: dict, tokenizer: object, **fields: object) -> TokenizedDocument:
    (document,) = TRANSFORM.tokenize([record], tokenizer, data_config(**fields))
    return document


@pytest.mark.parametrize(
    ("prompt", "completion"), [("prompt", "completion"), ("input", "output"), ("question", "answer")]
)
def test_usual_column_names_are_found(prompt: str, completion: str) -> None:
    document = one({prompt: "ab", completion: "cd"}, byte_tokenizer())
    assert document.input_ids.tolist() == [*b"abcd", 256]
    assert document.labels.tolist() == [-100, -100, *b"cd", 256]
    assert document.is_target.tolist() == [False, False, True, True, True]
    assert document.prompt_length == 2


def test_mapped_names_are_the_only_ones() -> None:
    config = data_config(fields=FieldMapping(prompt="q", completion="a"))
    assert TRANSFORM.content({"q": "x", "a": "y", "prompt": "no"}, config) == ["x", "y"]
    with pytest.raises(RowError, match="missing field `q`"):
        TRANSFORM.content({"prompt": "x", "completion": "y"}, config)


def test_the_separator_belongs_to_the_prompt() -> None:
    document = one({"prompt": "ab", "completion": "cd"}, byte_tokenizer(), prompt_separator="\n")
    assert document.input_ids.tolist() == [*b"ab\ncd", 256]
    assert document.prompt_length == 3
    assert document.labels.tolist()[:3] == [-100] * 3


def test_bos_stands_once_before_the_prompt() -> None:
    for prompt in ("w0", "<s> w0"):
        document = one({"prompt": prompt, "completion": " w1"}, word_tokenizer(bos=True))
        assert document.input_ids.tolist() == [0, 3, 4, 1]
        assert document.prompt_length == 2


def test_where_tokens_merge_across_the_seam_the_prompt_stays_as_at_inference() -> None:
    vocabulary = {"a": 0, "b": 1, "ab": 2, "</s>": 3}
    backend = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    assert tokenizer("ab").input_ids == [2]
    assert one({"prompt": "a", "completion": "b"}, tokenizer).input_ids.tolist() == [0, 1, 3]
    assert one({"prompt": "b", "completion": "ab"}, tokenizer).input_ids.tolist() == [1, 2, 3]


@given(
    prompt=st.lists(st.integers(0, 9), max_size=12),
    completion=st.lists(st.integers(10, 19), min_size=1, max_size=12),
    length=st.integers(2, 16),
)
def test_truncation_keeps_the_prompt_first_and_one_completion_token(
    prompt: list[int], completion: list[int], length: int
) -> None:
    document = join(prompt, completion, length)
    kept = document.input_ids.tolist()
    assert len(kept) == min(length, len(prompt) + len(completion))
    from_prompt = [token for token in kept if token < 10]
    from_completion = [token for token in kept if token >= 10]
    assert kept == from_prompt + from_completion
    assert from_completion == completion[: len(from_completion)]
    assert len(from_completion) >= 1
    if len(prompt) < length:
        assert from_prompt == prompt
    else:
        assert from_prompt == prompt[: length - 1]
    assert document.labels.tolist() == [-100] * len(from_prompt) + from_completion


def test_an_empty_side_is_a_bad_row() -> None:
    for record in ({"prompt": "", "completion": "x"}, {"prompt": "x", "completion": " "}):
        with pytest.raises(RowError, match="empty"):
            TRANSFORM.content(record, data_config())


def test_the_answer_alone_is_learned_if_wanted() -> None:
    record = {"prompt": "ab", "completion": "<think>hm</think> cd"}
    document = one(record, byte_tokenizer(), thinking="answer_only")
    assert document.input_ids.tolist() == [*b"abcd", 256]
    with pytest.raises(RowError, match="nothing is left"):
        TRANSFORM.content(
            {"prompt": "x", "completion": "<think>y</think>"}, data_config(thinking="answer_only")
        )


@given(
    prompt=st.text("ab \n", min_size=1).filter(str.strip),
    answer=st.text("ab \n", min_size=1).filter(str.strip),
)
def test_structured_examples_are_whole_and_begin_with_the_prompt(prompt: str, answer: str) -> None:
    assert TRANSFORM.examples is not None
    config = data_config(sequence_length=2)
    ((document,),) = TRANSFORM.examples([{"prompt": prompt, "completion": answer}], byte_tokenizer(), config)
    assert document.input_ids.tolist() == [*prompt.encode(), *answer.encode(), 256]
    assert document.prompt_length == len(prompt.encode())
    assert document.is_target.tolist() == [False] * len(prompt) + [True] * (len(answer) + 1)
