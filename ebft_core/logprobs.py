"""Log-probabilities of generated and document tokens from one packed forward.

log π(token | …) = log softmax(logits / τ)[token], with the τ the sampler used. The predictor of
(b, j, 0) is document position a_b - 1, the predictor of (b, j, s > 0) is (b, j, s - 1). It is never
"the previous row of the packed tensor", which for s = 0 would be another block's token.

The head runs on predictor positions only, in chunks that are recomputed in the backward pass, so no
(T, V) tensor ever exists. The N samples of an anchor share their first predictor, which is computed
once. The last token of a block predicts nothing and is not fed. Legend: see `geometry.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ebft_core.attention import PackedAttention, run_backbone
from ebft_core.attention.packed import Backend
from ebft_core.geometry import count_positions, pack_layout
from ebft_core.model_parts import backbone_of, head_of, prepare_for_packing

HEAD_ROWS = 1024
"""Positions per call of the head: bounds the logits that exist at once."""

IGNORE = -100
"""Label of a token without supervision."""


@dataclass(frozen=True)
class PackedOutput:
    """What one packed forward yields.

    Attributes:
        logprob_RANG: log-probabilities of the generated tokens at τ; 0 at anchors that are -1.
        entropy_RANG: entropy of the distributions they were scored with, in nats; no gradient.
        label_logprob_RL: log-probability at temperature 1 of every supervised document token, 0
            elsewhere; None when no labels were given.
    """

    logprob_RANG: Tensor
    entropy_RANG: Tensor
    label_logprob_RL: Tensor | None


def packed_logprobs(
    model: nn.Module,
    input_ids_RL: Tensor,
    anchors_RA: Tensor,
    tokens_RANG: Tensor,
    *,
    temperature: float,
    document_ids_RL: Tensor | None = None,
    attention: Backend = "sdpa",
) -> Tensor:
    """Log-probabilities `logprob_RANG` of the blocks: float32, differentiable, 0 at anchors that are -1.

    Args:
        temperature: τ > 0, the sampler's.
        document_ids_RL: documents of packed rows, -1 = padding; None: one document per row.
        attention: `sdpa` or `flex`.

    Raises:
        UserError: the architecture is not supported. ValueError: temperature is not positive.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32,
        ...     num_hidden_layers=2, num_attention_heads=2))
        >>> document_RL, tokens_RANG = torch.randint(0, 50, (1, 40)), torch.randint(0, 50, (1, 2, 3, 5))
        >>> anchors_RA = torch.tensor([[8, 16]])
        >>> logprob_RANG = packed_logprobs(model, document_RL, anchors_RA, tokens_RANG, temperature=0.6)
        >>> logprob_RANG.shape, logprob_RANG.requires_grad
        (torch.Size([1, 2, 3, 5]), True)
    """
    return packed_forward(
        model,
        input_ids_RL,
        anchors_RA,
        tokens_RANG,
        temperature=temperature,
        document_ids_RL=document_ids_RL,
        attention=attention,
    ).logprob_RANG


def packed_forward(
    model: nn.Module,
    input_ids_RL: Tensor,
    anchors_RA: Tensor,
    tokens_RANG: Tensor,
    *,
    temperature: float,
    labels_RL: Tensor | None = None,
    document_ids_RL: Tensor | None = None,
    attention: Backend = "sdpa",
) -> PackedOutput:
    """`packed_logprobs` with what else the same forward can tell: entropies and label log-probabilities.

    Args:
        labels_RL: document tokens to score at temperature 1 (label i is predicted by position i - 1);
            -100 = not supervised. The first token of a document is never scored.
    """
    if temperature <= 0:
        raise ValueError(f"log-probabilities need temperature > 0, got {temperature}")
    R, L = input_ids_RL.shape
    _, A, N, G = tokens_RANG.shape
    prepare_for_packing(model, count_positions(L, anchors_RA, G))
    layout = pack_layout(anchors_RA, N, G - 1, L, document_ids_RL)
    fed_RX = tokens_RANG[..., :-1].reshape(R, A * N * (G - 1))
    packed_RT = torch.cat([input_ids_RL, fed_RX], dim=1)
    plan = PackedAttention(layout, attention)
    hidden_RTH = run_backbone(backbone_of(model), packed_RT, layout.position_RT, plan)
    H = hidden_RTH.shape[-1]
    head = head_of(model)

    before_RA = (anchors_RA - 1).clamp(min=0)
    first_RAH = hidden_RTH[:, :L].gather(1, before_RA[..., None].expand(R, A, H))
    first_XN, entropy_X1 = token_logprobs(
        head, first_RAH.reshape(R * A, H), tokens_RANG[..., 0].reshape(R * A, N), temperature
    )
    later_XH = hidden_RTH[:, L:].reshape(R * A * N * (G - 1), H)
    later_X1, entropy_later_X1 = token_logprobs(
        head, later_XH, tokens_RANG[..., 1:].reshape(-1, 1), temperature
    )
    valid_RA11 = layout.valid_RA[:, :, None, None]
    logprob = torch.cat([first_XN.view(R, A, N, 1), later_X1.view(R, A, N, G - 1)], dim=-1)
    entropy = torch.cat(
        [entropy_X1.view(R, A, 1, 1).expand(R, A, N, 1), entropy_later_X1.view(R, A, N, G - 1)], dim=-1
    )
    return PackedOutput(
        logprob_RANG=torch.where(valid_RA11, logprob, 0.0),
        entropy_RANG=torch.where(valid_RA11, entropy, 0.0),
        label_logprob_RL=None
        if labels_RL is None
        else _label_logprobs(head, hidden_RTH[:, :L], _scored_labels(labels_RL, layout.position_RT[:, :L])),
    )


def token_logprobs(
    head: nn.Module, hidden_XH: Tensor, tokens_XN: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities `(X, N)` of N tokens per hidden state; entropies `(X, 1)` without gradient."""
    X, N = tokens_XN.shape
    if X == 0:
        return hidden_XH.new_zeros(0, N, dtype=torch.float32), hidden_XH.new_zeros(0, 1, dtype=torch.float32)
    chunks = []
    for start in range(0, X, HEAD_ROWS):
        part = slice(start, start + HEAD_ROWS)
        chunks.append(
            checkpoint(_score, head, hidden_XH[part], tokens_XN[part], temperature, use_reentrant=False)
            if torch.is_grad_enabled()
            else _score(head, hidden_XH[part], tokens_XN[part], temperature)
        )
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _score(
    head: nn.Module, hidden_XH: Tensor, tokens_XN: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits_XV = head(hidden_XH).float() / temperature
    normaliser_X1 = logits_XV.logsumexp(dim=-1, keepdim=True)
    with torch.no_grad():
        mean_logit_X1 = (torch.exp(logits_XV - normaliser_X1) * logits_XV).sum(dim=-1, keepdim=True)
        entropy_X1 = normaliser_X1 - mean_logit_X1
    return logits_XV.gather(-1, tokens_XN) - normaliser_X1, entropy_X1.detach()


def _scored_labels(labels_RL: Tensor, position_RL: Tensor) -> Tensor:
    """Labels without the first token of each document: nothing in its own document predicts it."""
    return labels_RL.masked_fill(position_RL == 0, IGNORE)


def count_scored_labels(labels_RL: Tensor, document_ids_RL: Tensor | None) -> int:
    """Tokens that `packed_forward` scores for `labels_RL`: the denominator of the cross-entropy."""
    layout = pack_layout(
        labels_RL.new_empty(labels_RL.shape[0], 0), 1, 1, labels_RL.shape[1], document_ids_RL
    )
    return int((_scored_labels(labels_RL, layout.position_RT) != IGNORE).sum())


def _label_logprobs(head: nn.Module, hidden_RLH: Tensor, labels_RL: Tensor) -> Tensor:
    rows, positions = (labels_RL != IGNORE).nonzero(as_tuple=True)
    hidden_XH = hidden_RLH[rows, positions - 1]
    logprob_X1, _ = token_logprobs(head, hidden_XH, labels_RL[rows, positions][:, None], 1.0)
    result_RL = torch.zeros(labels_RL.shape, dtype=torch.float32, device=labels_RL.device)
    return result_RL.index_put((rows, positions), logprob_X1[:, 0])
