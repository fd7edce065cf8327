"""What the samplers of structured mode are asked for, and what they hand back.

A row holds its prompt and its ground truth as token ids; a ground truth of several turns holds the given
turns in between. The sampler writes a turn, the given tokens are inserted as they stand in the row, it writes
the next one, and so on: nothing is decoded or tokenised again. Legend: see `geometry.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ebft_core.blocks import Blocks
from ebft_core.config import RunConfig

SHORTEST_BOUND = 64
"""Least bound that the length of a ground truth puts on its completions, in tokens."""


@dataclass(frozen=True)
class Turn:
    """A turn to be written.

    Attributes:
        given_ids: tokens inserted before it (the user's turn and the next header); none before the first.
        reference_length: tokens that the ground truth has for it.
    """

    given_ids: list[int]
    reference_length: int


@dataclass(frozen=True)
class PromptRequest:
    """A prompt of which N completions are wanted.

    Attributes:
        row_id: the row's number in its dataset, seed of its random numbers.
        prompt_ids: everything before the first turn.
        turns: at least one.
        max_new_tokens: bound on a whole completion, given tokens included.
    """

    row_id: int
    prompt_ids: list[int]
    turns: list[Turn]
    max_new_tokens: int


@dataclass(frozen=True)
class Sample:
    """One completion of a prompt, all turns.

    Attributes:
        token_ids: written and given tokens in their order; a stop token that ended a turn is among them.
        action: whether the policy wrote the token.
        logprobs: log-probabilities under the distribution each token was drawn from (temperature, penalty,
            top-k, top-p and min-p applied), 0 for given tokens. The trainer's are those of the whole softmax
            at the same temperature, so where truncation is on, their ratio is one to the truncated sampler.
        truncated: it met its bound before the last turn ended.
    """

    token_ids: list[int]
    action: list[bool]
    logprobs: list[float] | None
    truncated: bool


@dataclass(frozen=True)
class Group:
    """The N samples of a prompt; None for each that failed, and why the last of those did."""

    row_id: int
    samples: list[Sample | None]
    problem: str | None = None


def request_of(row: Mapping[str, Any], config: RunConfig) -> PromptRequest:
    """The request that a row of the tokenized dataset (with its `row_id`) makes.

    With `adaptive_max_tokens` the turns together may be `gt_length_multiplier` times as long as those of the
    ground truth, but at least 64 tokens; given tokens come on top, `max_completion_length` holds for all.

    Raises:
        ValueError: nothing of the row is to be written right behind its prompt.
    """
    prompt_length, length = int(row["prompt_lengths"][0]), int(row["document_lengths"][0])
    ids = np.asarray(row["input_ids"], dtype=np.int64)[:length]
    turns = _turns(ids[prompt_length:], np.asarray(row["is_target"], dtype=bool)[prompt_length:length])
    if prompt_length < 1 or not turns or turns[0].given_ids:
        raise ValueError(f"row {row['row_id']} has no prompt with a turn right behind it")
    ebft = config.ebft
    bound = ebft.max_completion_length
    if ebft.adaptive_max_tokens:
        written = math.ceil(ebft.gt_length_multiplier * sum(turn.reference_length for turn in turns))
        given = sum(len(turn.given_ids) for turn in turns)
        bound = min(bound, max(SHORTEST_BOUND, written) + given)
    return PromptRequest(int(row["row_id"]), ids[:prompt_length].tolist(), turns, bound)


def _turns(ids_G: np.ndarray, written_G: np.ndarray) -> list[Turn]:
    """Runs of written tokens, each with the given tokens before it."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], written_G, [False]]).astype(np.int8)))
    turns, behind = [], 0
    for start, stop in edges.reshape(-1, 2).tolist():
        turns.append(Turn(ids_G[behind:start].tolist(), stop - start))
        behind = stop
    return turns


@dataclass
class Conversation:
    """A sample while it is written: turn, given tokens, turn, …, within the request's bound."""

    request: PromptRequest
    token_ids: list[int] = field(default_factory=list)
    action: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turn: int = 0
    truncated: bool = False

    @property
    def room(self) -> int:
        """Tokens that the present turn may still have; 0 when the sample is finished."""
        if self.truncated or self.turn == len(self.request.turns):
            return 0
        return self.request.max_new_tokens - len(self.token_ids)

    @property
    def history(self) -> list[int]:
        """Everything the next token depends on."""
        return self.request.prompt_ids + self.token_ids

    def write(self, token_ids: Sequence[int], logprobs: Sequence[float], *, ended: bool) -> None:
        """Append tokens of the present turn; where they end it, insert what is given before the next.

        Args:
            ended: the last of them is a stop token. Otherwise the sample ends as soon as there is no room.
        """
        self._append(token_ids, True, logprobs)
        if ended:
            self.turn += 1
            self._give()
        elif self.room < 1:
            self.truncated = True

    def stop(self) -> None:
        """End the sample inside the present turn."""
        self.truncated = True

    def finish(self) -> Sample:
        """The sample."""
        return Sample(self.token_ids, self.action, self.logprobs, self.truncated)

    def _give(self) -> None:
        if self.turn == len(self.request.turns):
            return
        given = self.request.turns[self.turn].given_ids
        if self.room <= len(given):  # no token of the turn would have room behind them
            self.truncated = True
            return
        self._append(given, False, [0.0] * len(given))

    def _append(self, token_ids: Sequence[int], action: bool, logprobs: Sequence[float]) -> None:
        self.token_ids += token_ids
        self.action += [action] * len(token_ids)
        self.logprobs += logprobs


def to_blocks(groups: Sequence[Group], anchors_RA: Tensor, pad: int, *, version: int = 0) -> Blocks:
    """The groups of a micro-batch as blocks, one anchor per row.

    Args:
        groups: one per row, in the order of the rows, N samples each; a failed one gets length 0.
        anchors_RA: `(R, 1)`, the ends of the prompts.
        pad: token behind the end of shorter blocks.
        version: optimiser steps behind the weights of the samples.

    Raises:
        ValueError: groups and rows do not fit, or groups have different numbers of samples.
    """
    sizes = {len(group.samples) for group in groups}
    if anchors_RA.shape != (len(groups), 1) or len(sizes) != 1:
        found = tuple(anchors_RA.shape)
        raise ValueError(f"{len(groups)} groups of {sorted(sizes)} samples do not fit anchors {found}")
    samples = [[sample or _FAILED for sample in group.samples] for group in groups]
    flat = [sample for row in samples for sample in row]
    G = max(1, *(len(sample.token_ids) for sample in flat))
    known = all(sample.logprobs is not None for sample in flat)
    shape = (len(groups), 1, sizes.pop(), G)
    device = anchors_RA.device

    def padded(values: list[list[Any]], fill: float, dtype: torch.dtype) -> Tensor:
        rows = [value + [fill] * (G - len(value)) for value in values]
        return torch.tensor(rows, dtype=dtype, device=device).view(shape)

    return Blocks(
        tokens_RANG=padded([s.token_ids for s in flat], pad, torch.int64),
        length_RAN=torch.tensor([len(s.token_ids) for s in flat], device=device).view(shape[:3]),
        action_RANG=padded([s.action for s in flat], False, torch.bool),
        sampler_logprob_RANG=padded([s.logprobs or [] for s in flat], 0.0, torch.float32) if known else None,
        truncated_RAN=torch.tensor([s.truncated for s in flat], device=device).view(shape[:3]),
        weight_version=version,
    )


_FAILED = Sample([], [], [], False)
