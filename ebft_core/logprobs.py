"""Log-probabilities of generated and document tokens.

log π(token | …) = log softmax(logits / τ)[token], with the τ the sampler used. The predictor of
(b, j, 0) is document position a_b - 1, the predictor of (b, j, s > 0) is (b, j, s - 1). It is never
"the previous row of the packed tensor", which for s = 0 would be another block's token.

The head runs on predictor positions only, in chunks, so no (T, V) tensor ever exists. The N samples of
an anchor share their first predictor, which is computed once; so does everything after it for samples
with equal tokens. The last token of a block predicts nothing and is not fed. Legend: see `geometry.py`;
X chosen blocks (`blocks.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ebft_core.attention import Backend
from ebft_core.blocks import BlockChoice, Blocks, choose_blocks, first_duplicates, parts_of
from ebft_core.forward import Documents, block_phase, document_phase, tokens_per_forward
from ebft_core.geometry import count_positions, pack_layout
from ebft_core.kernels.selective_logprob import plain_head, score_logits, selective_logprob
from ebft_core.model_parts import head_of, prepare_for_packing

HEAD_ROWS = 512
"""Positions per call of a head that is not a plain matrix: bounds the logits that exist at once."""

IGNORE = -100
"""Label of a token without supervision."""


@dataclass(frozen=True)
class PackedOutput:
    """What one packed forward yields.

    Attributes:
        logprob_RANG: log-probabilities of the generated tokens at τ; 0 where there is no action.
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
    blocks: Blocks | None = None,
) -> Tensor:
    """Log-probabilities `logprob_RANG` of the blocks: float32, differentiable, 0 where there is no action.

    Args:
        temperature: τ > 0, the sampler's.
        document_ids_RL: documents of packed rows, -1 = padding; None: one document per row.
        attention: `sdpa` or `flex`.
        blocks: lengths and actions of the blocks; None: every token at a real anchor is an action.

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
        blocks=blocks,
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
    blocks: Blocks | None = None,
) -> PackedOutput:
    """`packed_logprobs` with what else the same forward can tell: entropies and label log-probabilities.

    Args:
        labels_RL: document tokens to score at temperature 1 (label i is predicted by position i - 1);
            -100 = not supervised. The first token of a document is never scored.
    """
    if temperature <= 0:
        raise ValueError(f"log-probabilities need temperature > 0, got {temperature}")
    blocks = Blocks.full(tokens_RANG, anchors_RA) if blocks is None else blocks
    prepare_for_packing(model, count_positions(input_ids_RL.shape[1], anchors_RA, tokens_RANG.shape[3]))
    phase, documents = document_phase(input_ids_RL, document_ids_RL, attention)
    hidden_RLH, head = phase.run(model), head_of(model)
    first, entropy_first = first_token_logprobs(head, hidden_RLH, anchors_RA, tokens_RANG, temperature)
    later, entropy_later = _later_tokens(model, documents, anchors_RA, blocks, temperature)
    logprob = torch.cat([first[..., None], later], dim=-1)
    entropy = torch.cat([entropy_first[..., None], entropy_later], dim=-1)
    labels = None
    if labels_RL is not None:
        labels = label_logprobs(head, hidden_RLH, scored_labels(labels_RL, document_ids_RL))
    return PackedOutput(
        logprob_RANG=torch.where(blocks.action_RANG, logprob, 0.0),
        entropy_RANG=torch.where(blocks.action_RANG, entropy, 0.0),
        label_logprob_RL=labels,
    )


def first_token_logprobs(
    head: nn.Module, hidden_RLH: Tensor, anchors_RA: Tensor, tokens_RANG: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies `(R, A, N)` of each block's first token, from the document alone."""
    R, A, N, _ = tokens_RANG.shape
    hidden_XH = before_anchors(hidden_RLH, anchors_RA).flatten(0, 1)
    tokens_XN = tokens_RANG[..., 0].reshape(R * A, N)
    logprob_XN, entropy_X1 = token_logprobs(head, hidden_XH, tokens_XN, temperature)
    return logprob_XN.view(R, A, N), entropy_X1.view(R, A, 1).expand(R, A, N)


def before_anchors(hidden_RLH: Tensor, anchors_RA: Tensor) -> Tensor:
    """Document hidden states `(R, A, H)` that predict the blocks' first tokens."""
    before_RA1 = (anchors_RA - 1).clamp(min=0)[..., None]
    return hidden_RLH.gather(1, before_RA1.expand(-1, -1, hidden_RLH.shape[-1]))


@dataclass(frozen=True)
class BlockPart:
    """Some chosen blocks after their forward pass.

    Attributes:
        where: their slice of the chosen blocks.
        hidden_RXSH: hidden states of the tokens fed: state s predicts token s + 1.
        next_RXS: the tokens predicted.
        tokens_fed: tokens that passed through the model: fewer than S·X where prefixes are shared.
    """

    where: slice
    hidden_RXSH: Tensor
    next_RXS: Tensor
    tokens_fed: int


def block_parts(
    model: nn.Module,
    documents: Documents,
    anchors_RA: Tensor,
    blocks: Blocks,
    choice: BlockChoice,
    max_tokens: int | None = None,
    *,
    share_prefixes: bool = True,
) -> Iterator[BlockPart]:
    """Forward passes of the chosen blocks, part by part, each as wide as its longest block."""
    tokens_RXG, length_RX = choice.pick(blocks.tokens_RANG), choice.pick(blocks.length_RAN)
    anchors_RX = choice.pick_anchors(anchors_RA, blocks.tokens_RANG.shape[2])
    limit = tokens_per_forward(tokens_RXG.device, max_tokens)
    for part in parts_of(anchors_RX, tokens_RXG.shape[2] - 1, limit):
        width = int(length_RX[:, part].max()) - 1
        if width < 1:
            continue
        fed_RXS = tokens_RXG[:, part, :width]
        phase = block_phase(documents, anchors_RX[:, part], fed_RXS, share_prefixes=share_prefixes)
        hidden_RXSH = phase.run(model).unflatten(1, fed_RXS.shape[1:])
        yield BlockPart(part, hidden_RXSH, tokens_RXG[:, part, 1 : width + 1], phase.tokens_fed)


def choose_actions(
    anchors_RA: Tensor, blocks: Blocks, wanted_RAN: Tensor | None = None, *, merge: bool = True
) -> BlockChoice:
    """Distinct blocks at real anchors that hold at least two tokens (the first needs no forward).

    Args:
        wanted_RAN: blocks that are needed; None: all.
        merge: one block stands for all samples of its group that have its tokens.
    """
    used_RAN = (anchors_RA >= 0)[..., None] & (blocks.length_RAN > 1)
    if wanted_RAN is not None:
        used_RAN = used_RAN & wanted_RAN
    itself = torch.arange(used_RAN.shape[2], device=used_RAN.device).expand_as(used_RAN)
    first_RAN = first_duplicates(blocks.tokens_RANG, blocks.length_RAN) if merge else itself
    return choose_blocks(first_RAN, used_RAN, blocks.length_RAN)


def _later_tokens(
    model: nn.Module, documents: Documents, anchors_RA: Tensor, blocks: Blocks, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies `(R, A, N, G-1)` of all tokens but the first."""
    N, width = blocks.tokens_RANG.shape[2], blocks.tokens_RANG.shape[3] - 1
    choice, head = choose_actions(anchors_RA, blocks), head_of(model)
    results: list[tuple[Tensor, Tensor]] = []
    for part in block_parts(model, documents, anchors_RA, blocks, choice):
        logprob_RXS, entropy_RXS = part_logprobs(head, part, temperature)
        missing = (0, width - logprob_RXS.shape[2])
        results.append(
            (
                torch.nn.functional.pad(logprob_RXS, missing),
                torch.nn.functional.pad(entropy_RXS, missing),
            )
        )
    if not results:
        nothing = torch.zeros(*blocks.length_RAN.shape, width, device=blocks.length_RAN.device)
        return nothing, nothing
    logprobs, entropies = (torch.cat(parts, dim=1) for parts in zip(*results, strict=True))
    return choice.spread(logprobs, N), choice.spread(entropies, N)


def part_logprobs(head: nn.Module, part: BlockPart, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies `(R, X, S)` of the tokens that a part predicts."""
    shape = part.next_RXS.shape
    logprob_X1, entropy_X1 = token_logprobs(
        head, part.hidden_RXSH.flatten(0, 2), part.next_RXS.reshape(-1, 1), temperature
    )
    return logprob_X1.view(shape), entropy_X1.view(shape)


def token_logprobs(
    head: nn.Module, hidden_XH: Tensor, tokens_XN: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities `(X, N)` of N tokens per hidden state; entropies `(X, 1)` without gradient."""
    matrix = plain_head(head)
    if matrix is not None:
        return selective_logprob(hidden_XH, matrix[0], tokens_XN, temperature, matrix[1])
    if hidden_XH.shape[0] == 0:
        return selective_logprob(
            hidden_XH, hidden_XH.new_zeros(1, hidden_XH.shape[1]), tokens_XN, temperature
        )
    chunks = [
        score_logits(head(rows_XH), tokens, temperature)
        for rows_XH, tokens in zip(hidden_XH.split(HEAD_ROWS), tokens_XN.split(HEAD_ROWS), strict=True)
    ]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def scored_labels(labels_RL: Tensor, document_ids_RL: Tensor | None) -> Tensor:
    """Labels without the first token of each document: nothing in its own document predicts it."""
    layout = pack_layout(labels_RL[:, :0], 1, 1, labels_RL.shape[1], document_ids_RL)
    return labels_RL.masked_fill(layout.position_RT == 0, IGNORE)


def count_scored_labels(labels_RL: Tensor, document_ids_RL: Tensor | None) -> int:
    """Tokens that are scored for `labels_RL`: the denominator of the cross-entropy."""
    return int((scored_labels(labels_RL, document_ids_RL) != IGNORE).sum())


def label_logprobs(head: nn.Module, hidden_RLH: Tensor, labels_RL: Tensor) -> Tensor:
    """Log-probabilities at temperature 1 of the labels, `(R, L)`, 0 where there is none.

    Args:
        labels_RL: from `scored_labels`; label i is predicted by position i - 1.
    """
    rows, positions = (labels_RL != IGNORE).nonzero(as_tuple=True)
    hidden_XH = hidden_RLH[rows, positions - 1]
    logprob_X1, _ = token_logprobs(head, hidden_XH, labels_RL[rows, positions][:, None], 1.0)
    result_RL = torch.zeros(labels_RL.shape, dtype=torch.float32, device=labels_RL.device)
    return result_RL.index_put((rows, positions), logprob_X1[:, 0])
