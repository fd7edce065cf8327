"""The packed forward in two phases: the documents once, then their blocks in parts.

A block sees its document through the keys and values of the prefix and nothing else, so any part of the
blocks can run by itself against the kept keys and values. `Documents.detached` cuts the graph there: the
parts leave gradients on the kept tensors, and one backward pass of the documents takes them up. That
is the exact gradient, with the activations of one part alive at a time. Legend: see `geometry.py`;
X blocks, S tokens fed of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ebft_core.attention import Backend, BlockAttention, DocumentAttention, KeyValues, run_backbone
from ebft_core.attention.registry import AttentionPlan
from ebft_core.attention.shared import SharedAttention, Trie, trie_of
from ebft_core.geometry import pack_layout
from ebft_core.model_parts import backbone_of

TOKENS_PER_FORWARD = {"cpu": 1024, "cuda": 16384}
"""Block tokens of one forward pass, by device: enough for full matrix products, few enough for memory."""


@dataclass(frozen=True)
class Phase:
    """One forward pass: its tokens, their positions, and who computes attention."""

    input_ids_RT: Tensor
    position_RT: Tensor
    plan: AttentionPlan
    trie: Trie | None = None

    @property
    def tokens_fed(self) -> int:
        """Tokens that pass through the model."""
        return self.input_ids_RT.numel()

    def run(self, model: nn.Module) -> Tensor:
        """Last hidden states `(R, T, H)`, behind the final norm."""
        return self.spread(run_backbone(backbone_of(model), self.input_ids_RT, self.position_RT, self.plan))

    def spread(self, hidden_RUH: Tensor) -> Tensor:
        """Hidden states of what was fed, at all tokens of the phase."""
        return hidden_RUH if self.trie is None else self.trie.spread(hidden_RUH)


@dataclass(frozen=True)
class Documents:
    """What blocks need of their documents: keys and values of every layer that has been run.

    Attributes:
        length: L.
        document_ids_RL: documents of packed rows; None: one document per row.
    """

    length: int
    document_ids_RL: Tensor | None
    backend: Backend
    kept: KeyValues

    def detached(self) -> Documents:
        """The same numbers as leaves that collect gradients of their own."""
        leaves = KeyValues(
            {layer: _leaf(x) for layer, x in self.kept.keys.items()},
            {layer: _leaf(x) for layer, x in self.kept.values.items()},
        )
        return Documents(self.length, self.document_ids_RL, self.backend, leaves)

    def gradients_from(self, leaves: Documents) -> tuple[list[Tensor], list[Tensor]]:
        """Kept tensors whose leaves have collected a gradient, and those gradients."""
        pairs = [
            (own[layer], leaf.grad)
            for own, theirs in ((self.kept.keys, leaves.kept.keys), (self.kept.values, leaves.kept.values))
            for layer, leaf in theirs.items()
            if leaf.grad is not None
        ]
        return [own for own, _ in pairs], [gradient for _, gradient in pairs]


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad)


def document_phase(
    input_ids_RL: Tensor, document_ids_RL: Tensor | None, backend: Backend
) -> tuple[Phase, Documents]:
    """Phase one, and the documents that are ready for blocks once it has run."""
    L = input_ids_RL.shape[1]
    layout = pack_layout(input_ids_RL[:, :0], 1, 1, L, document_ids_RL)
    plan = DocumentAttention(layout, backend)
    phase = Phase(input_ids_RL, layout.position_RT, plan)
    return phase, Documents(L, document_ids_RL, backend, plan.kept)


def block_phase(
    documents: Documents, anchors_RX: Tensor, tokens_RXS: Tensor, *, share_prefixes: bool = True
) -> Phase:
    """Phase two: a forward pass of blocks that each have an anchor of their own, -1 for none.

    Args:
        share_prefixes: blocks of one anchor that begin alike are computed once as far as they do.
    """
    R, X, S = tokens_RXS.shape
    layout = pack_layout(anchors_RX, 1, S, documents.length, documents.document_ids_RL)
    plan = BlockAttention(layout, documents.backend, documents.kept)
    fed_RT, position_RT = tokens_RXS.reshape(R, X * S), layout.position_RT[:, documents.length :]
    trie = trie_of(anchors_RX, tokens_RXS) if share_prefixes else None
    if trie is None:
        return Phase(fed_RT, position_RT, plan)
    return Phase(trie.fed(fed_RT), trie.fed(position_RT), SharedAttention(plan, trie), trie)


def tokens_per_forward(device: torch.device, configured: int | None = None) -> int:
    """Block tokens per forward pass: as configured, or what suits the device."""
    return configured or TOKENS_PER_FORWARD["cuda" if device.type == "cuda" else "cpu"]
