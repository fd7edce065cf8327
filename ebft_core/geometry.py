"""Where rollouts start and how a packed row is laid out.

Legend (used in every file of the core): R rows, L document tokens, A anchors per row, N samples per
anchor, G generated tokens per block, T = L + A·N·G packed tokens, F feature layers, H hidden size,
D features, V vocabulary, X any flattened index. A tensor's name ends in its axes: `phi_RAND`.

A packed row is the document followed by its generated blocks, *block-major*: token (b, j, s) of
anchor b, sample j, step s stands at L + ((b·N) + j)·G + s. So a block's tokens are neighbours and the
generated × generated part of the attention mask is block-diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NO_ANCHOR = -1
"""Fills `anchors_RA` of rows that have fewer anchors than the widest row."""


def place_anchors(
    length: int,
    *,
    stride: int,
    context_length: int,
    generate_max_len: int,
    prompt_length: int = 0,
    min_completion_prefix: int = 0,
) -> Tensor:
    """Anchors of one document: a_0 = max(context_length, prompt_length + min_completion_prefix), then every
    `stride` tokens as long as the whole target `doc[a : a + generate_max_len]` lies inside the document.

    Args:
        length: real (unpadded) tokens of the document.
        stride, context_length, generate_max_len: tokens.
        prompt_length: tokens of the prompt; no target starts inside it.
        min_completion_prefix: completion tokens kept before the first target.

    Returns:
        `anchors_A`, int64, strictly increasing; empty when the document is too short. An anchor is at
        least 1, because its first token needs a predecessor to be predicted from.

    Raises:
        ValueError: a length is negative, or `stride` or `generate_max_len` is not positive.

    Example:
        >>> place_anchors(40, stride=8, context_length=8, generate_max_len=8)
        tensor([ 8, 16, 24, 32])
    """
    if stride < 1 or generate_max_len < 1:
        raise ValueError(f"stride and generate_max_len must be >= 1, got {stride} and {generate_max_len}")
    if min(length, context_length, prompt_length, min_completion_prefix) < 0:
        raise ValueError("length, context_length, prompt_length and min_completion_prefix must be >= 0")
    first = max(1, context_length, prompt_length + min_completion_prefix)
    return torch.arange(first, max(first, length - generate_max_len + 1), stride, dtype=torch.int64)


@dataclass(frozen=True)
class PackedLayout:
    """What the mask and the position ids of packed rows are made from; all tensors int64.

    Attributes:
        length: L, the document's width (padding included).
        anchors_RA: anchors, `NO_ANCHOR` where a row has none.
        n_samples, block_length: N and G.
        document_RT: document of each token; a block belongs to the document its prefix ends in,
            padding is -1, blocks without an anchor are -2.
        prefix_end_RT: each token sees document tokens before this index (its own document only).
        block_T: number of the block (b·N + j), -1 for document tokens.
        position_RT: position id, restarting in each document.
        document_masking: whether rows hold several documents that must not see each other.
    """

    length: int
    anchors_RA: Tensor
    n_samples: int
    block_length: int
    document_RT: Tensor
    prefix_end_RT: Tensor
    block_T: Tensor
    position_RT: Tensor
    document_masking: bool

    @property
    def valid_RA(self) -> Tensor:
        """True where there is an anchor."""
        return self.anchors_RA != NO_ANCHOR

    @property
    def num_blocks(self) -> int:
        """A·N."""
        return self.anchors_RA.shape[1] * self.n_samples


def pack_layout(
    anchors_RA: Tensor,
    n_samples: int,
    generate_max_len: int,
    length: int,
    document_ids_RL: Tensor | None = None,
) -> PackedLayout:
    """Layout of rows with N blocks of `generate_max_len` tokens at every anchor.

    Args:
        anchors_RA: int64, `NO_ANCHOR` (-1) as padding.
        length: L.
        document_ids_RL: document of every token, non-decreasing within a row, -1 for padding. None: each
            row is one document (padding at its end needs no mark: nothing looks ahead).

    Raises:
        ValueError: an anchor is outside 1…length.
    """
    R, A = anchors_RA.shape
    device = anchors_RA.device
    valid_RA = anchors_RA != NO_ANCHOR
    if A and bool(((anchors_RA < 1) & valid_RA).any() | (anchors_RA > length).any()):
        raise ValueError(f"anchors must lie in 1…{length} (or be {NO_ANCHOR} for none)")
    index_L = torch.arange(length, device=device)
    if document_ids_RL is None:
        document_RL = torch.zeros(R, length, dtype=torch.int64, device=device)
        position_RL = index_L.expand(R, length)
    else:
        document_RL = document_ids_RL.to(device=device, dtype=torch.int64)
        position_RL = _position_in_document(document_RL)
    before_RA = (anchors_RA - 1).clamp(min=0)
    anchor_document_RA = torch.where(valid_RA, document_RL.gather(1, before_RA), -2)
    anchor_position_RA = position_RL.gather(1, before_RA) + 1
    block_tokens = n_samples * generate_max_len

    def per_token(value_RA: Tensor) -> Tensor:
        return value_RA.repeat_interleave(block_tokens, dim=1)

    step_X = torch.arange(generate_max_len, device=device).repeat(A * n_samples)
    blocks_X = torch.arange(A * n_samples, device=device).repeat_interleave(generate_max_len)
    return PackedLayout(
        length=length,
        anchors_RA=anchors_RA,
        n_samples=n_samples,
        block_length=generate_max_len,
        document_RT=torch.cat([document_RL, per_token(anchor_document_RA)], dim=1),
        prefix_end_RT=torch.cat([(index_L + 1).expand(R, length), per_token(anchors_RA.clamp(min=0))], dim=1),
        block_T=torch.cat([torch.full((length,), -1, device=device), blocks_X]),
        position_RT=torch.cat([position_RL, per_token(anchor_position_RA) + step_X], dim=1),
        document_masking=document_ids_RL is not None,
    )


def count_positions(length: int, anchors_RA: Tensor, generate_max_len: int) -> int:
    """Positions that packed rows use: the document's, or more where a block reaches beyond its end."""
    last = int(anchors_RA.max()) if anchors_RA.numel() else 0
    return max(length, last + generate_max_len)


def _position_in_document(document_RL: Tensor) -> Tensor:
    """Distance of every token from the first token of its document."""
    index_L = torch.arange(document_RL.shape[1], device=document_RL.device)
    starts_RL = torch.ones_like(document_RL, dtype=torch.bool)
    starts_RL[:, 1:] = document_RL[:, 1:] != document_RL[:, :-1]
    start_RL = torch.where(starts_RL, index_L, 0).cummax(dim=1).values
    return index_L - start_RL
