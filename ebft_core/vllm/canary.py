"""Does the server compute what the trainer computes? Both score one continuation after every weight sync.

The server writes the continuation, as it writes completions. It is not asked for the log-probabilities of a
prompt: with adapters, vLLM computes those with the row numbers of the tokens that the whole batch samples,
and its engine ends (on a CPU) as soon as other requests run beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import nn

from ebft_core.attention import Backend
from ebft_core.errors import UserError
from ebft_core.forward import document_phase
from ebft_core.geometry import count_positions
from ebft_core.logprobs import label_logprobs, scored_labels
from ebft_core.model_parts import evaluation_mode, head_of, prepare_for_packing
from ebft_core.vllm.client import VLLMClient

CONTINUED = 16
"""Tokens that are compared; a shorter text has fewer."""


@dataclass(frozen=True)
class Canary:
    """A text whose beginning the server continues to the same length.

    Args:
        token_ids: at least two; the same for the whole run.
        tolerance: largest mean difference of log-probabilities (`rollout.canary_tolerance`).
        attention: backend of the trainer's forward pass.
    """

    token_ids: Sequence[int]
    tolerance: float
    attention: Backend = "sdpa"

    def __post_init__(self) -> None:
        if len(self.token_ids) < 2:
            raise ValueError("a canary needs a token to predict and one before it")

    def check(self, client: VLLMClient, name: str, policy: nn.Module) -> float:
        """The mean absolute difference of the log-probabilities at temperature 1.

        Raises:
            UserError: it is above the tolerance, or not a number.
            ServerGone, RequestRefused: as `VLLMClient.complete`.
        """
        kept = max(1, len(self.token_ids) - CONTINUED)
        prompt = list(self.token_ids[:kept])
        (written,) = client.complete(prompt, max_tokens=len(self.token_ids) - kept, seed=0, model=name)
        theirs = written.logprobs
        ours = own_logprobs(policy, [*prompt, *written.token_ids], self.attention)[-len(theirs) :]
        difference = fmean(abs(a - b) for a, b in zip(theirs, ours, strict=True))
        if not difference <= self.tolerance:  # also when it is not a number
            raise UserError(
                "the server does not compute what the trainer computes",
                where="rollout.canary_tolerance",
                value=f"mean log-probability of {len(ours)} tokens: server {fmean(theirs):.4f} ({name}), "
                f"trainer {fmean(ours):.4f}; mean difference {difference:.4f}",
                expected=f"a mean difference of at most {self.tolerance}",
                hint="likely causes: the server ignores the adapter or has another base model; its numbers "
                "are coarser (`vllm.dtype`: bfloat16 against float32 differs by about 0.01, more in a model "
                "with large logits); or the trainer's log-probabilities have diverged",
            )
        return difference


def own_logprobs(policy: nn.Module, token_ids: Sequence[int], attention: Backend = "sdpa") -> list[float]:
    """The policy's log-probability of each token but the first at temperature 1, without dropout."""
    device = next(policy.parameters()).device
    input_ids_RL = torch.tensor([list(token_ids)], device=device)
    prepare_for_packing(policy, count_positions(len(token_ids), input_ids_RL[:, :0], 0))
    with torch.no_grad(), evaluation_mode(policy):
        phase, _ = document_phase(input_ids_RL, None, attention)
        logprob_RL = label_logprobs(head_of(policy), phase.run(policy), scored_labels(input_ids_RL, None))
    return [float(x) for x in logprob_RL[0, 1:].tolist()]
