"""What an evaluation measures, one record per rollout block and per document. Imports without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ebft_core.bootstrap import Floats


@dataclass(frozen=True)
class BlockRecord:
    """One anchor: N samples against the ground truth, on raw unit features.

    Attributes:
        row_id, anchor: where it is; `document`: hash of the document it belongs to.
        usable: its features are finite and not zero; otherwise it enters no mean and is counted.
        cfm, cfm_biased: ‖mean φ_j - y‖² without and with the samples' variance; cfm is NaN for N = 1.
        alignments: the cosine of every sample with the ground truth.
        diversity: mean cosine between different samples (small is diverse); NaN for N = 1.
        duplicate_rate: share of the samples that repeat an earlier one.
        entropy: mean entropy of the policy at the tokens it wrote, at the sampling temperature, in nats.
        tokens: the N sampled blocks: G token ids each, or as many as a completion has.
        written: for each of them, whether the policy wrote it; a user's turn inside a completion was given.
        truncated: completions that met their length bound before they ended; None for blocks of a fixed
            length.
    """

    row_id: int
    anchor: int
    document: str
    usable: bool
    cfm: float
    cfm_biased: float
    alignments: tuple[float, ...]
    diversity: float
    duplicate_rate: float
    entropy: float
    tokens: tuple[tuple[int, ...], ...]
    written: tuple[tuple[bool, ...], ...]
    truncated: tuple[bool, ...] | None = None

    @property
    def written_tokens(self) -> int:
        """Tokens that the policy wrote, in all samples."""
        return sum(map(sum, self.written))


@dataclass(frozen=True)
class LikelihoodRecord:
    """Cross-entropy of one document in one row: its sum in nats over so many supervised tokens."""

    row_id: int
    document: str
    nll_sum: float
    tokens: int


@dataclass(frozen=True)
class ProblemScores:
    """A metric of a downstream task.

    Attributes:
        statistics_SP: S statistics of P problems, in the order of the problems.
        score: from sums of statistics `(S, X)` to the metric `(X,)`.
    """

    statistics_SP: Floats
    score: Callable[[Floats], Floats]

    @property
    def value(self) -> float:
        """The metric on all problems."""
        return float(self.score(self.statistics_SP.sum(axis=1, keepdims=True))[0])


def mean_of(values: Sequence[float]) -> ProblemScores:
    """A metric that is the mean of one value per problem."""
    statistics_2P = np.stack([np.asarray(values, dtype=np.float64), np.ones(len(values))])
    return ProblemScores(statistics_2P, lambda sums_2X: sums_2X[0] / sums_2X[1])


@dataclass(frozen=True)
class AnswerRecord:
    """What a model answered to one problem of a task.

    Attributes:
        task: its name; `origin`: file and line of the problem, or hash of the held-out document.
        prompt, expected: as people read them; `expected` holds the references, or the tests.
        answers: one text per sample.
        verdicts: for each of them `right`, `wrong` or what went wrong; empty where answers are not judged
            one by one.
    """

    task: str
    origin: str
    prompt: str
    expected: str
    answers: tuple[str, ...]
    verdicts: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON values under the same names."""
        return asdict(self)


@dataclass
class Measurements:
    """Everything measured on one model, in the order of the rows; the tasks' metrics by their whole names."""

    blocks: list[BlockRecord] = field(default_factory=list)
    likelihoods: list[LikelihoodRecord] = field(default_factory=list)
    scores: Mapping[str, ProblemScores] = field(default_factory=dict)
    answers: list[AnswerRecord] = field(default_factory=list)

    @property
    def dropped_blocks(self) -> int:
        """Blocks whose features cannot be used."""
        return sum(not block.usable for block in self.blocks)
