"""Gradients of one micro-batch, with the activations of one part of its blocks alive at a time.

The loss is a sum over tokens, so each token's share is known as soon as its log-probability is:

1. the documents run once, with a graph;
2. the blocks run in parts against detached keys and values; each part's head runs in chunks whose backward
   pass follows at once, then the part's own, which leaves gradients on the keys and values;
3. one backward pass of the documents takes up those gradients, the cross-entropy's, and those of the
   blocks' first tokens.

Nothing is computed twice and nothing is approximated. Samples with equal tokens are one block with the
sum of their coefficients; blocks without a coefficient are left out. Legend: see `geometry.py`; X chosen
blocks, S tokens that a part predicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ebft_core.attention import Backend
from ebft_core.blocks import Blocks
from ebft_core.config import EBFTConfig
from ebft_core.forward import Documents, document_phase
from ebft_core.geometry import count_positions
from ebft_core.logprobs import (
    HEAD_ROWS,
    BlockPart,
    before_anchors,
    block_parts,
    choose_actions,
    label_logprobs,
    scored_labels,
    token_logprobs,
)
from ebft_core.losses import TokenTerms, cross_entropy_loss, importance_ratio, token_losses
from ebft_core.model_parts import head_of, prepare_for_packing
from ebft_core.rows import RowBatch

Autocast = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class BatchCounts:
    """Denominators of the losses: counts over the whole optimiser batch.

    Attributes:
        actions: generated tokens that the policy chose.
        labels: supervised document tokens.
    """

    actions: int
    labels: int

    def __add__(self, other: BatchCounts) -> BatchCounts:
        return BatchCounts(self.actions + other.actions, self.labels + other.labels)


@dataclass
class RatioSums:
    """Sums over importance ratios; `+=` adds those of another micro-batch."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    smallest: float = math.inf
    largest: float = 0.0

    def add(self, ratio: Tensor) -> None:
        """Take in ratios of any shape."""
        if ratio.numel():
            ratio = ratio.double()
            self += RatioSums(
                ratio.numel(),
                float(ratio.sum()),
                float(ratio.square().sum()),
                float(ratio.min()),
                float(ratio.max()),
            )

    def __iadd__(self, other: RatioSums) -> RatioSums:
        self.count += other.count
        self.total += other.total
        self.squares += other.squares
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)
        return self

    def metrics(self) -> dict[str, float]:
        """Smallest, mean and largest ratio, and the effective share of the samples; empty without ratios."""
        if not self.count:
            return {}
        return {
            "rollout/is_ratio_min": self.smallest,
            "rollout/is_ratio_mean": self.total / self.count,
            "rollout/is_ratio_max": self.largest,
            "rollout/effective_sample_size": self.total**2 / (self.count * self.squares),
        }


@dataclass
class LossSums:
    """Total loss of a micro-batch and its parts, as shares of the optimiser batch's means; no gradient.

    Attributes:
        entropy: summed over the generated tokens that were scored.
        scored: number of those tokens.
        tokens_fed: generated tokens that passed through the model.
        ratios: importance ratios of the generated tokens, before they are capped.
    """

    loss: float = 0.0
    rl: float = 0.0
    ce: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    scored: int = 0
    tokens_fed: int = 0
    ratios: RatioSums = field(default_factory=RatioSums)


def accumulate_gradients(
    policy: nn.Module,
    batch: RowBatch,
    blocks: Blocks,
    terms_RANG: TokenTerms,
    config: EBFTConfig,
    counts: BatchCounts,
    *,
    attention: Backend,
    max_tokens: int | None = None,
    share_prefixes: bool = True,
    autocast: Autocast = nullcontext,
) -> LossSums:
    """Add the gradient of rl_coef·RL + ce_coef·CE + kl_coef·KL to the policy's parameters.

    Args:
        terms_RANG: what each generated token's loss is made of, `(R, A, N, G)`.
        counts: of the whole optimiser batch, so that the losses of its micro-batches add up.
        max_tokens: block tokens per forward pass; None: what suits the device.
        share_prefixes: samples that begin alike are computed once as far as they do.
        autocast: context of the forward passes.
    """
    prepare_for_packing(
        policy, count_positions(batch.input_ids_RL.shape[1], batch.anchors_RA, blocks.tokens_RANG.shape[3])
    )
    sums = LossSums()
    head, objective = head_of(policy), _Objective(config, counts, autocast, sums)
    with autocast():
        phase, documents = document_phase(batch.input_ids_RL, batch.document_ids_RL, attention)
        hidden_RLH = phase.run(policy)
    leaves = documents.detached()
    later = terms_RANG.map(lambda x: x[..., 1:])
    choice = choose_actions(batch.anchors_RA, blocks, later.active.any(dim=-1), merge=later.mergeable)
    parts = block_parts(
        policy, leaves, batch.anchors_RA, blocks, choice, max_tokens, share_prefixes=share_prefixes
    )
    _blocks_backward(head, objective, parts, later.merged(choice))
    hidden_leaf = hidden_RLH.detach().requires_grad_()
    _first_tokens_backward(head, objective, hidden_leaf, batch.anchors_RA, blocks, terms_RANG)
    if config.ce_coef > 0:
        objective.cross_entropy(head, hidden_leaf, scored_labels(batch.labels_RL, batch.document_ids_RL))
    _documents_backward(hidden_RLH, hidden_leaf, documents, leaves)
    sums.loss = config.rl_coef * sums.rl + config.ce_coef * sums.ce + config.kl_coef * sums.kl
    return sums


@dataclass(frozen=True)
class _Objective:
    """Runs the head on hidden states and sends their gradients back, chunk by chunk."""

    config: EBFTConfig
    counts: BatchCounts
    autocast: Autocast
    sums: LossSums

    def tokens(
        self,
        head: nn.Module,
        hidden_XH: Tensor,
        tokens_XN: Tensor,
        terms_XN: TokenTerms,
    ) -> None:
        """Backward pass of generated tokens, N of which share a hidden state `(X, H)`."""
        step = hidden_XH.shape[0] if hidden_XH.is_cuda else HEAD_ROWS
        for start in range(0, hidden_XH.shape[0], max(step, 1)):
            self._chunk(head, hidden_XH, tokens_XN, terms_XN, slice(start, start + step))

    def _chunk(
        self, head: nn.Module, hidden_XH: Tensor, tokens_XN: Tensor, terms_XN: TokenTerms, rows: slice
    ) -> None:
        config, terms = self.config, terms_XN.map(lambda x: x[rows])
        with self.autocast():
            logprob, entropy = token_logprobs(head, hidden_XH[rows], tokens_XN[rows], config.temperature)
        losses = token_losses(logprob, terms, config.kl_estimator, self.counts.actions)
        self._backward(config.rl_coef * losses.rl + config.kl_coef * losses.kl)
        ratio = importance_ratio(logprob, terms)
        if ratio is not None:
            self.sums.ratios.add(ratio[terms.samples > 0])
        self.sums.rl += float(losses.rl.detach())
        self.sums.kl += float(losses.kl.detach())
        self.sums.entropy += float((entropy * terms.samples).sum())
        self.sums.scored += int(terms.samples.sum())

    def cross_entropy(self, head: nn.Module, hidden_RLH: Tensor, labels_RL: Tensor) -> None:
        """Backward pass of the supervised document tokens."""
        with self.autocast():
            logprob_RL = label_logprobs(head, hidden_RLH, labels_RL)
        loss = cross_entropy_loss(logprob_RL, self.counts.labels)
        self._backward(self.config.ce_coef * loss)
        self.sums.ce += float(loss.detach())

    @staticmethod
    def _backward(loss: Tensor) -> None:
        if loss.requires_grad:
            loss.backward()


def _blocks_backward(
    head: nn.Module, objective: _Objective, parts: Iterator[BlockPart], chosen: TokenTerms
) -> None:
    """All generated tokens but the first of each block."""
    while True:
        with objective.autocast():
            part = next(parts, None)
        if part is None:
            return
        objective.sums.tokens_fed += part.tokens_fed
        _part_backward(head, objective, part, chosen)


def _part_backward(head: nn.Module, objective: _Objective, part: BlockPart, chosen: TokenTerms) -> None:
    width = part.next_RXS.shape[2]
    terms = chosen.map(lambda x: x[:, part.where, :width].reshape(-1, 1))
    hidden_leaf = part.hidden_RXSH.detach().requires_grad_()
    objective.tokens(head, hidden_leaf.flatten(0, 2), part.next_RXS.reshape(-1, 1), terms)
    if hidden_leaf.grad is not None:
        part.hidden_RXSH.backward(hidden_leaf.grad)


def _first_tokens_backward(
    head: nn.Module,
    objective: _Objective,
    hidden_RLH: Tensor,
    anchors_RA: Tensor,
    blocks: Blocks,
    terms_RANG: TokenTerms,
) -> None:
    """The blocks' first tokens, which the document's own hidden states predict."""
    N = blocks.tokens_RANG.shape[2]
    hidden_RAH = before_anchors(hidden_RLH, anchors_RA)
    terms = terms_RANG.map(lambda x: x[..., 0].reshape(-1, N))
    objective.tokens(head, hidden_RAH.flatten(0, 1), blocks.tokens_RANG[..., 0].reshape(-1, N), terms)


def _documents_backward(
    hidden_RLH: Tensor, hidden_leaf: Tensor, documents: Documents, leaves: Documents
) -> None:
    tensors, gradients = documents.gradients_from(leaves)
    if hidden_leaf.grad is not None:
        tensors, gradients = [*tensors, hidden_RLH], [*gradients, hidden_leaf.grad]
    if tensors:
        torch.autograd.backward(tensors, gradients)
