"""What answers are worth: statistics of every problem that add up, and the metric that is made of the sums.

Most metrics are means over problems: (value, 1). BLEU is one of all answers together: its statistics are the
counts it is computed from. So the bootstrap can draw problems for either. Imports without torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import comb

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from ebft_core.bootstrap import Floats
from ebft_core.config.tasks_section import ExactMatchTask, PassAtKTask, TextOverlapTask
from ebft_core.evaluation.records import ProblemScores, mean_of

_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_BLEU_ORDER = 4


def exact_match(answer: str, references: Sequence[str], task: ExactMatchTask) -> bool:
    """Whether an answer equals one of the references."""
    found = _extracted(answer, task)
    right = {normal_form(_extracted(text, task) or text, task) for text in references}
    return found is not None and normal_form(found, task) in right


def _extracted(text: str, task: ExactMatchTask) -> str | None:
    """The part of a text that is compared; None where `extract` matches nothing."""
    if task.extract is None:
        return text
    matches = list(re.finditer(task.extract, text))
    if not matches:
        return None
    return matches[-1][1 if matches[-1].re.groups else 0]


def normal_form(text: str, task: ExactMatchTask) -> str:
    """The text without what does not count; runs of white space are one space."""
    if task.ignore_case:
        text = text.casefold()
    if task.ignore_punctuation:
        text = re.sub(r"[^\w\s]|_", "", text)
    return " ".join(text.split())


def overlap_scores(
    answers: Sequence[Sequence[str]], references: Sequence[Sequence[str]], task: TextOverlapTask
) -> dict[str, ProblemScores]:
    """BLEU of all answers together, chrF as the mean over answers; both from 0 to 100.

    Args:
        answers, references: one list per problem.
    """
    scores = {}
    pairs = list(zip(answers, references, strict=True))
    if "bleu" in task.metrics:
        bleu = BLEU(tokenize=task.tokenize, effective_order=True)
        statistics = [sum(_bleu_statistics(bleu, text, right) for text in texts) for texts, right in pairs]
        scores["bleu"] = ProblemScores(np.stack(statistics, axis=1), _corpus_bleu)
    if "chrf" in task.metrics:
        chrf = CHRF()
        scores["chrf"] = mean_of(
            [
                float(np.mean([chrf.sentence_score(text, list(right)).score for text in texts]))
                for texts, right in pairs
            ]
        )
    return scores


def _bleu_statistics(bleu: BLEU, answer: str, references: Sequence[str]) -> Floats:
    """Matching n-grams, n-grams (n = 1 … 4), length of the answer, length of its closest reference."""
    found = bleu.sentence_score(answer, list(references))
    return np.array([*found.counts, *found.totals, found.sys_len, found.ref_len], dtype=np.float64)


def _corpus_bleu(sums_SX: Floats) -> Floats:
    columns = sums_SX.round().astype(int).T.tolist()
    return np.array([_bleu(column) for column in columns])


def _bleu(sums: list[int]) -> float:
    counts, totals = sums[:_BLEU_ORDER], sums[_BLEU_ORDER : 2 * _BLEU_ORDER]
    return float(BLEU.compute_bleu(counts, totals, sums[-2], sums[-1], smooth_method="exp").score)


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Chance that one of k different samples passes, without bias: 1 - C(n - c, k) / C(n, k)."""
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def program_of(prompt: str, answer: str, task: PassAtKTask) -> str:
    """The program that an answer is."""
    if task.program == "continuation":
        return prompt + answer
    fenced = _FENCE.search(answer)
    return fenced[1] if fenced else answer
