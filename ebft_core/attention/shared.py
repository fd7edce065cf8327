"""Common prefixes of a group's rollouts computed once.

Samples of one anchor that begin with the same tokens have the same hidden states up to where they part:
the rollouts of a group form a trie. A forward pass is fed the trie's nodes only. Attention alone needs
blocks again: its queries, keys and values are looked up from the nodes, and of its output each node
takes that of the first block it belongs to. Legend: see `geometry.py`; T tokens of the blocks, U nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ebft_core.attention.registry import AttentionPlan

MIN_SAVING = 0.1
"""Share of the tokens that must be spared before looking them up costs less than computing them."""


@dataclass(frozen=True)
class Trie:
    """Which tokens of the blocks are one node.

    Attributes:
        node_RT: node of every token.
        first_RU: first token of every node; token 0 pads rows with fewer nodes.
    """

    node_RT: Tensor
    first_RU: Tensor

    def fed(self, value_RT: Tensor) -> Tensor:
        """Values of the tokens, `(R, T)`, at the nodes, `(R, U)`."""
        return value_RT.gather(1, self.first_RU)

    def spread(self, hidden_RUH: Tensor) -> Tensor:
        """Hidden states of the nodes at all tokens, `(R, T, H)`."""
        rows_R1 = torch.arange(hidden_RUH.shape[0], device=hidden_RUH.device)[:, None]
        return hidden_RUH[rows_R1, self.node_RT]


def trie_of(group_RX: Tensor, tokens_RXS: Tensor) -> Trie | None:
    """The trie of blocks; None where it would spare too little.

    Args:
        group_RX: blocks with the same number share their context; negative ones (all the same) are padding.
    """
    _, X, S = tokens_RXS.shape
    if X * S == 0:
        return None
    related_RXX, padding_RXX = _related(group_RX)
    alike_RXXS = tokens_RXS[:, :, None] == tokens_RXS[:, None]
    alike_RXXS = related_RXX[..., None] & (alike_RXXS | padding_RXX[..., None])
    return _trie(alike_RXXS.cummin(dim=-1).values.int().argmax(dim=2))


def last_tokens_trie(group_RX: Tensor, tokens_RXS: Tensor) -> Trie | None:
    """The nodes of the blocks' last tokens alone (one token per block); None where it spares too little."""
    if tokens_RXS.numel() == 0:
        return None
    related_RXX, padding_RXX = _related(group_RX)
    alike_RXX = (tokens_RXS[:, :, None] == tokens_RXS[:, None]).all(dim=-1)
    alike_RXX = related_RXX & (alike_RXX | padding_RXX)
    return _trie(alike_RXX.int().argmax(dim=2, keepdim=True))


def _related(group_RX: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of blocks `(R, X, X)` with a common context, and pairs that are padding and count as equal."""
    padding_RX = group_RX < 0
    return group_RX[:, :, None] == group_RX[:, None], padding_RX[:, :, None] & padding_RX[:, None]


def _trie(leader_RXS: Tensor) -> Trie | None:
    """The trie of tokens (x, s) of which each is the same as (leader, s)."""
    _, X, S = leader_RXS.shape
    device = leader_RXS.device
    leads_RT = (leader_RXS == torch.arange(X, device=device)[:, None]).flatten(1)
    U = int(leads_RT.sum(dim=1).max())
    if U > (1 - MIN_SAVING) * X * S:
        return None
    number_RT = leads_RT.cumsum(dim=1) - 1
    leader_RT = (leader_RXS * S + torch.arange(S, device=device)).flatten(1)
    first_RU = leads_RT.int().argsort(dim=1, descending=True, stable=True)[:, :U]
    return Trie(number_RT.gather(1, leader_RT), first_RU.masked_fill(~leads_RT.gather(1, first_RU), 0))


class SharedAttention:
    """Runs another plan, which knows blocks only, in a forward over a trie's nodes."""

    def __init__(self, plan: AttentionPlan, trie: Trie) -> None:
        self.plan = plan
        self.trie = trie

    def attend(
        self, layer: int, query_RHUK: Tensor, key_RJUK: Tensor, value_RJUK: Tensor, scale: float
    ) -> Tensor:
        """Attention output `(R, H, U, K)` of the nodes."""
        node_RT, first_RU = self.trie.node_RT, self.trie.first_RU
        query, key, value = (_take(x, node_RT) for x in (query_RHUK, key_RJUK, value_RJUK))
        return _take(self.plan.attend(layer, query, key, value, scale), first_RU)


def _take(x_RHTK: Tensor, index_RU: Tensor) -> Tensor:
    """`(R, H, T, K)` at other tokens, `(R, H, U, K)`."""
    if x_RHTK.shape[0] == 1:
        return x_RHTK.index_select(2, index_RU[0])
    R, H, _, K = x_RHTK.shape
    return x_RHTK.gather(2, index_RU[:, None, :, None].expand(R, H, -1, K))
