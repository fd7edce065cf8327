"""Scores of answers, against counting, sacrebleu's corpus scores and the bootstrap of means."""

from __future__ import annotations

from dataclasses import astuple
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import sacrebleu
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from ebft_core.bootstrap import bootstrap_statistics, paired_bootstrap
from ebft_core.config.tasks_section import ExactMatchTask, PassAtKTask, TextOverlapTask
from ebft_core.evaluation.downstream.scoring import (
    exact_match,
    overlap_scores,
    pass_at_k,
    program_of,
)
from ebft_core.evaluation.downstream.writing import cut_at, decode_behind
from ebft_core.evaluation.records import mean_of
from ebft_core.metrics import METRICS, metric_of

HOW: dict[str, Any] = {"resamples": 300, "confidence": 0.9, "seed": 3}


@pytest.mark.parametrize(
    ("answer", "references", "options", "right"),
    [
        ("42", ["42"], {}, True),
        (" 42\n", ["42"], {}, True),
        ("a  b", ["a b"], {}, True),
        ("Paris", ["paris"], {}, False),
        ("Paris", ["paris"], {"ignore_case": True}, True),
        ("42.", ["42"], {"ignore_punctuation": True}, True),
        ("1", ["0", "1"], {}, True),
        ("so 3 and 4", ["4"], {"extract": r"\d"}, True),
        ("so 3 and 4", ["3"], {"extract": r"\d"}, False),
        ("it is #### 7", ["because #### 7"], {"extract": "#### (.*)"}, True),
        ("it is #### 7", ["7"], {"extract": "#### (.*)"}, True),
        ("7", ["7"], {"extract": "#### (.*)"}, False),  # the answer was not given as asked
    ],
)
def test_exact_match(answer: str, references: list[str], options: dict[str, Any], right: bool) -> None:
    task = ExactMatchTask(type="exact_match", name="t", **options)
    assert exact_match(answer, references, task) is right


def test_pass_at_k_counts_the_draws_with_a_success() -> None:
    for samples in range(1, 7):
        for passed in range(samples + 1):
            for k in range(1, samples + 1):
                draws = list(combinations(range(samples), k))
                lucky = sum(any(i < passed for i in draw) for draw in draws)
                assert pass_at_k(samples, passed, k) == pytest.approx(lucky / len(draws))


REFERENCES = [["the cat sat on the mat"], ["a dog barks", "the dog barks loudly"], ["it rains"], ["x y z"]]
BASE = [["the cat sat"], ["a dog barks at me"], ["it is raining"], ["nothing"]]
TUNED = [["the cat sat on a mat"], ["the dog barks loudly"], ["it rains"], ["x y"]]


def test_bleu_is_sacrebleu_s_of_the_whole_corpus() -> None:
    task = TextOverlapTask(type="text_overlap", name="t")
    second = [pair[1] if len(pair) > 1 else None for pair in REFERENCES]
    streams = [[pair[0] for pair in REFERENCES], second]
    for answers in (BASE, TUNED):
        scores = overlap_scores(answers, REFERENCES, task)
        flat = [texts[0] for texts in answers]
        assert scores["bleu"].value == pytest.approx(sacrebleu.corpus_bleu(flat, streams).score)
        single = [sacrebleu.sentence_chrf(t, r).score for t, r in zip(flat, REFERENCES, strict=True)]
        assert scores["chrf"].value == pytest.approx(np.mean(single))


def test_resamples_of_bleu_are_bleu_of_resamples() -> None:
    """With all problems equal but one, a resample is told by how often it holds that one."""
    task = TextOverlapTask(type="text_overlap", name="t", metrics=["bleu"])
    references = [["one two three four five"]] * 3 + [["six seven eight nine ten"]]
    base = overlap_scores([["one two three four six"]] * 4, references, task)["bleu"]
    tuned = overlap_scores([r[:1] for r in references], references, task)["bleu"]
    found = bootstrap_statistics(base.statistics_SP, tuned.statistics_SP, base.score, **HOW)
    drawn = [
        sacrebleu.corpus_bleu(
            ["one two three four six"] * 4, [[references[0][0]] * (4 - n) + [references[3][0]] * n]
        ).score
        for n in range(5)
    ]
    assert found.tuned == pytest.approx(100.0)
    assert found.tuned_interval == pytest.approx((100.0, 100.0))
    assert min(drawn) - 1e-9 <= found.base_interval[0] < found.base_interval[1] <= max(drawn) + 1e-9
    assert any(found.base_interval[0] == pytest.approx(score) for score in drawn)


def test_a_mean_has_the_interval_of_the_bootstrap_of_means() -> None:
    values = np.random.default_rng(0).random((2, 9))
    base, tuned = (mean_of(row.tolist()) for row in values)
    ones = np.ones(9)
    expected = paired_bootstrap(values[0], ones, values[1], ones, **HOW)
    found = bootstrap_statistics(base.statistics_SP, tuned.statistics_SP, base.score, **HOW)
    assert astuple(found)[:4] == pytest.approx(astuple(expected)[:4])
    assert found.interval == pytest.approx(expected.interval)


def test_unpaired_statistics_are_refused() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        bootstrap_statistics(np.ones((2, 3)), np.ones((2, 4)), lambda sums: sums[0], **HOW)


def test_texts_end_at_the_first_stop() -> None:
    assert cut_at("a\ndef b\nclass c", ["\nclass ", "\ndef "]) == "a"
    assert cut_at("a", ["b"]) == "a"


def test_indentation_survives_decoding() -> None:
    """Tokenizers like Llama 2's write a space at the front of a word, and strip it at the front of a text."""
    words = {word: i for i, word in enumerate(["<unk>", "▁def", ":", "▁", "▁return"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    assert tokenizer.decode([3, 4]) == " return"
    assert decode_behind(tokenizer, [1, 2], [3, 4]) == "  return"


@pytest.mark.parametrize(
    ("program", "answer", "expected"),
    [
        ("continuation", "  return 1", "def f():\n  return 1"),
        ("fenced", "Sure:\n```python\nx = 1\n```\nand\n```\ny\n```", "x = 1\n"),
        ("fenced", "```\nx = 1", "x = 1"),  # cut at its bound
        ("fenced", "x = 1", "x = 1"),
    ],
)
def test_the_program_in_an_answer(program: str, answer: str, expected: str) -> None:
    task = PassAtKTask(type="pass_at_k", name="t", program=program)
    assert program_of("def f():\n", answer, task) == expected


def test_every_metric_says_what_it_is() -> None:
    assert metric_of("cfm") is METRICS["cfm"]
    task = metric_of("tasks/code/pass_at_10")
    assert (task.label, task.better, task.per) == ("code: pass_at_10", "higher", "problem")
    with pytest.raises(KeyError):
        metric_of("nothing")
