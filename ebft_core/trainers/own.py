"""Rewards of the user's own, called on the completions of a micro-batch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from torch import Tensor

from ebft_core.blocks import Blocks
from ebft_core.own_rewards import OwnRewards, combine_own
from ebft_core.tokenizer import Tokenizer

GROUND_TRUTH = "ground_truth"
"""Column with the decoded ground truth, beside the data set's own."""


@dataclass(frozen=True)
class OwnScores:
    """What the functions said of a micro-batch.

    Attributes:
        total_RAN: weighted sums `(R, 1, N)`, NaN where no function applies.
        metrics: each function's mean, by its name, and what functions gave to `log_metric`.
        columns: what they gave to `log_extra`: R·N entries each, sample by sample.
    """

    total_RAN: Tensor
    metrics: Mapping[str, float]
    columns: Mapping[str, Sequence[Any]]


class OwnScorer:
    """Decodes completions and calls the functions of section `rewards`.

    Args:
        tokenizer: of the policy. Functions read text; nothing of it is tokenised again.
    """

    def __init__(self, rewards: OwnRewards, tokenizer: Tokenizer) -> None:
        self._rewards = rewards
        self._tokenizer: Any = tokenizer

    def score(self, rows: Sequence[Mapping[str, Any]], blocks: Blocks, trainer_state: Any) -> OwnScores:
        """Call the functions on every completion of a micro-batch.

        Raises:
            UserError: a function fails or returns something else than it should.
        """
        R, A, N, _ = blocks.tokens_RANG.shape
        prompts, columns = self._texts(rows, N)
        ids = [
            blocks.tokens_RANG[r, 0, n, : blocks.length_RAN[r, 0, n]].tolist()
            for r in range(R)
            for n in range(N)
        ]
        output = self._rewards.score(
            prompts=prompts,
            completions=[self._decode(tokens) for tokens in ids],
            completion_ids=ids,
            columns=columns,
            trainer_state=trainer_state,
        )
        means = {
            name.replace(":", "."): fmean(value for value in values if value is not None)
            for name, values in zip(self._rewards.names, output.rewards, strict=True)
            if any(value is not None for value in values)
        }
        return OwnScores(
            total_RAN=combine_own(output.rewards, self._rewards.weights, (R, A, N)),
            metrics={**means, **output.metrics},
            columns=output.extra,
        )

    def _texts(
        self, rows: Sequence[Mapping[str, Any]], n_samples: int
    ) -> tuple[list[str], dict[str, list[Any]]]:
        """Prompts and columns, each repeated for every sample of its row."""
        prompts: list[str] = []
        columns: dict[str, list[Any]] = {GROUND_TRUTH: []}
        extras = [json.loads(row["extra"]) if row.get("extra") else {} for row in rows]
        names = {name for extra in extras for name in extra}
        for row, extra in zip(rows, extras, strict=True):
            ids, start = list(row["input_ids"]), int(row["prompt_lengths"][0])
            prompts += [self._decode(ids[:start])] * n_samples
            values = {GROUND_TRUTH: self._decode(ids[start:]), **{name: extra.get(name) for name in names}}
            for name, value in values.items():
                columns.setdefault(name, []).extend([value] * n_samples)
        return prompts, columns

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
