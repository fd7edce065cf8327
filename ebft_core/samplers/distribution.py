"""The distribution a token is drawn from, as vLLM makes it from the logits.

In vLLM's order: repetition penalty, temperature, min-p, top-k, top-p, and the log-softmax of what is left. So
the log-probabilities here are comparable with the ones a server reports (`--logprobs-mode
processed_logprobs`). The trainer's log-probabilities know the temperature only: where anything else is
switched on, a ratio of the two is one to the truncated sampler. Legend: see `geometry.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ebft_core.config import EBFTConfig

_OUT = float("-inf")


def sampling_logprobs(logits_XV: Tensor, seen_XV: Tensor | None, config: EBFTConfig) -> Tensor:
    """Log-probabilities `(X, V)`, float32, `-inf` for tokens that are left out.

    Args:
        logits_XV: of any float type.
        seen_XV: tokens that the prompt or the completion holds already; read only with a penalty.
    """
    logits_XV = logits_XV.float()
    if config.repetition_penalty != 1.0:
        assert seen_XV is not None  # whoever asks for a penalty keeps the record
        logits_XV = _penalised(logits_XV, seen_XV, config.repetition_penalty)
    logits_XV = logits_XV / config.temperature
    if config.min_p > 0.0:
        probs_XV = logits_XV.softmax(dim=-1)
        floor_X1 = config.min_p * probs_XV.amax(dim=-1, keepdim=True)
        logits_XV = logits_XV.masked_fill(probs_XV < floor_X1, _OUT)
    if 0 < config.top_k < logits_XV.shape[-1]:
        least_X1 = logits_XV.topk(config.top_k, dim=-1).values[:, -1:]
        logits_XV = logits_XV.masked_fill(logits_XV < least_X1, _OUT)
    if config.top_p < 1.0:
        logits_XV = _nucleus(logits_XV, config.top_p)
    return logits_XV.log_softmax(dim=-1)


def draw(logprob_XV: Tensor, uniforms_X: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row by inverse CDF, and its log-probability; both `(X,)`.

    Raises:
        FloatingPointError: the log-probabilities are not finite.
    """
    cdf_XV = logprob_XV.double().exp().cumsum(dim=-1)
    # Scaled by the last value: no number lies beyond a total that was rounded.
    level_X1 = uniforms_X.to(cdf_XV)[:, None] * cdf_XV[:, -1:]
    tokens_X1 = torch.searchsorted(cdf_XV, level_X1, right=True).clamp_(max=cdf_XV.shape[-1] - 1)
    chosen_X = logprob_XV.gather(1, tokens_X1)[:, 0]
    if not bool(chosen_X.isfinite().all()):
        raise FloatingPointError("the policy's logits are not finite: training has diverged")
    return tokens_X1[:, 0], chosen_X


def _penalised(logits_XV: Tensor, seen_XV: Tensor, penalty: float) -> Tensor:
    """Positive logits of seen tokens divided by the penalty, negative ones multiplied."""
    lowered_XV = torch.where(logits_XV > 0, logits_XV / penalty, logits_XV * penalty)
    return torch.where(seen_XV, lowered_XV, logits_XV)


def _nucleus(logits_XV: Tensor, top_p: float) -> Tensor:
    """The smallest set of most likely tokens whose probability reaches `top_p`; never empty."""
    sorted_XV, order_XV = logits_XV.softmax(dim=-1).sort(dim=-1, descending=True)
    out_XV = sorted_XV.cumsum(dim=-1) - sorted_XV >= top_p
    return logits_XV.masked_fill(torch.zeros_like(out_XV).scatter(-1, order_XV, out_XV), _OUT)
