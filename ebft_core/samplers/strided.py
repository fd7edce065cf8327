"""Block-parallel rollout at every anchor of every row, in this process.

The document is prefilled once per row into a key/value cache; each step then feeds only the newest
token of every block. Token 0 of a block is drawn from the logits of document position a_b - 1, later
tokens from the logits of the block's previous token; the last token needs no forward pass. The head
runs on the positions that are sampled from and nowhere else. Cost in token-forwards per row:
L + (G - 1)·A·N. Legend: see `geometry.py`.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

from ebft_core.attention import PrefixCache, run_backbone
from ebft_core.attention.shared import SharedAttention, last_tokens_trie
from ebft_core.geometry import PackedLayout, count_positions, pack_layout
from ebft_core.model_parts import backbone_of, evaluation_mode, head_of, prepare_for_packing

HEAD_ROWS = 512
"""Positions per call of the head while sampling: bounds the logits that exist at once."""

CDF_BIN = 128
"""Tokens per bin of the cumulative distribution: bins are summed first, then one of them is looked into."""


def rollout(
    model: nn.Module,
    input_ids_RL: Tensor,
    anchors_RA: Tensor,
    *,
    n_samples: int,
    generate_max_len: int,
    temperature: float,
    top_p: float = 1.0,
    generator: Generator | None = None,
    document_ids_RL: Tensor | None = None,
    uniforms_RANG: Tensor | None = None,
    share_prefixes: bool = True,
) -> Tensor:
    """N continuations of G tokens at every anchor.

    Args:
        model: causal language model (or PEFT model, adapters as they are set); run without dropout.
        input_ids_RL: document tokens, padded at the end.
        anchors_RA: int64, -1 where a row has fewer anchors.
        temperature: τ of softmax(logits / τ); 0 takes the most likely token.
        top_p: smallest set of most likely tokens whose probability reaches `top_p`; 1.0 is off.
        generator: source of the random numbers, on any device; None: the global one of the CPU.
        document_ids_RL: documents of a packed row, -1 = padding; None: one document per row.
        uniforms_RANG: random numbers in [0, 1) to use instead of `generator`: one per token, drawn by
            inverse CDF, so the same numbers give two similar models similar samples.
        share_prefixes: feed samples that are equal so far once. Never on a GPU, where counting them would
            make every step wait.

    Returns:
        `tokens_RANG`, int64; zeros at anchors that are -1.

    Raises:
        UserError: the architecture is not supported. FloatingPointError: the logits are not finite.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32,
        ...     num_hidden_layers=2, num_attention_heads=2))
        >>> document_RL = torch.randint(0, 50, (1, 40))
        >>> anchors_RA = torch.tensor([[8, 16, 24, 32]])
        >>> rollout(model, document_RL, anchors_RA, n_samples=3, generate_max_len=5, temperature=0.6).shape
        torch.Size([1, 4, 3, 5])
    """
    R, L = input_ids_RL.shape
    A = anchors_RA.shape[1]
    if uniforms_RANG is None and temperature > 0:
        device = torch.device("cpu") if generator is None else generator.device
        shape = (R, A, n_samples, generate_max_len)
        uniforms_RANG = torch.rand(shape, generator=generator, device=device)
    prepare_for_packing(model, count_positions(L, anchors_RA, generate_max_len))
    if A == 0:
        return input_ids_RL.new_zeros(R, 0, n_samples, generate_max_len)
    layout = pack_layout(anchors_RA, n_samples, generate_max_len, L, document_ids_RL)
    with torch.no_grad(), evaluation_mode(model):
        share = share_prefixes and input_ids_RL.device.type == "cpu"
        tokens_RBG = _decode_blocks(model, input_ids_RL, layout, temperature, top_p, uniforms_RANG, share)
    tokens_RANG = tokens_RBG.view(R, A, n_samples, generate_max_len)
    return tokens_RANG * layout.valid_RA[:, :, None, None]


def _decode_blocks(
    model: nn.Module,
    input_ids_RL: Tensor,
    layout: PackedLayout,
    temperature: float,
    top_p: float,
    uniforms_RANG: Tensor | None,
    share_prefixes: bool,
) -> Tensor:
    backbone, head = backbone_of(model), head_of(model)
    R, L = input_ids_RL.shape
    B, G, N = layout.num_blocks, layout.block_length, layout.n_samples
    device = input_ids_RL.device
    uniforms_RBG = None if uniforms_RANG is None else uniforms_RANG.to(device).reshape(R, B, G)
    position_RBG = layout.position_RT[:, L:].view(R, B, G)
    tokens_RBG = torch.empty(R, B, G, dtype=torch.int64, device=device)
    finite = torch.ones((), dtype=torch.bool, device=device)
    cache = PrefixCache(layout)
    anchors_RB = layout.anchors_RA.repeat_interleave(N, dim=1)

    hidden_RLH = run_backbone(backbone, input_ids_RL, layout.position_RT[:, :L], cache)
    before_RA = (layout.anchors_RA - 1).clamp(min=0)
    hidden_RAH = hidden_RLH.gather(1, before_RA[..., None].expand(-1, -1, hidden_RLH.shape[-1]))
    repeats = N  # the N samples of an anchor share the distribution of their first token
    hidden_RXH = hidden_RAH
    for step in range(G):
        uniforms_RB = None if uniforms_RBG is None else uniforms_RBG[:, :, step]
        tokens_RB, ok = _sample(head, hidden_RXH, repeats, uniforms_RB, temperature, top_p)
        tokens_RBG[:, :, step] = tokens_RB
        finite &= ok
        if step + 1 < G:
            cache.step = step
            so_far_RBS = tokens_RBG[:, :, : step + 1]
            trie = last_tokens_trie(anchors_RB, so_far_RBS) if share_prefixes else None
            share_prefixes = trie is not None  # samples that have parted stay apart
            position_RB = position_RBG[:, :, step]
            if trie is None:
                hidden_RXH = run_backbone(backbone, tokens_RB, position_RB, cache)
            else:
                plan = SharedAttention(cache, trie)
                hidden_RUH = run_backbone(backbone, trie.fed(tokens_RB), trie.fed(position_RB), plan)
                hidden_RXH = trie.spread(hidden_RUH)
            repeats = 1
    if not bool(finite):
        raise FloatingPointError("the policy's logits are not finite: training has diverged")
    return tokens_RBG


def _sample(
    head: nn.Module,
    hidden_RXH: Tensor,
    repeats: int,
    uniforms_RB: Tensor | None,
    temperature: float,
    top_p: float,
) -> tuple[Tensor, Tensor]:
    """One token for each of `repeats` blocks per hidden state; and whether all logits were finite."""
    R, X, H = hidden_RXH.shape
    flat_XH = hidden_RXH.reshape(R * X, H)
    uniforms_XN = None if uniforms_RB is None else uniforms_RB.reshape(R * X, repeats)
    chunks, finite = [], torch.ones((), dtype=torch.bool, device=flat_XH.device)
    for start in range(0, R * X, HEAD_ROWS):
        part = slice(start, start + HEAD_ROWS)
        logits_XV = head(flat_XH[part]).float()
        if uniforms_XN is None or temperature == 0:
            best_X1, tokens_X1 = logits_XV.max(dim=-1, keepdim=True)
            finite &= best_X1.isfinite().all()
            chunks.append(tokens_X1.expand(-1, repeats))
        else:
            tokens_XN, total_X1 = _inverse_cdf(logits_XV, uniforms_XN[part], temperature, top_p)
            finite &= total_X1.isfinite().all()  # one bad logit makes the whole softmax NaN
            chunks.append(tokens_XN)
    return torch.cat(chunks).reshape(R, X * repeats), finite


def _inverse_cdf(
    logits_XV: Tensor, uniforms_XN: Tensor, temperature: float, top_p: float
) -> tuple[Tensor, Tensor]:
    """Tokens `(X, N)`: the first whose cumulative probability exceeds the number; and the totals `(X, 1)`.

    A running sum over the vocabulary is slow and loses digits: bins are found by their sums, tokens in bins.
    """
    probs_XV = logits_XV.div_(temperature).softmax(dim=-1)
    if top_p < 1.0:
        probs_XV = _nucleus(probs_XV, top_p)
    V = probs_XV.shape[1]
    whole = V - V % CDF_BIN
    sums_XC = probs_XV[:, :whole].unflatten(1, (-1, CDF_BIN)).sum(dim=-1)
    if whole < V:
        sums_XC = torch.cat([sums_XC, probs_XV[:, whole:].sum(dim=-1, keepdim=True)], dim=1)
    bin_XN, share_XN, total_X1 = _pick(sums_XC, uniforms_XN.to(sums_XC))
    token_XNC = bin_XN[..., None] * CDF_BIN + torch.arange(CDF_BIN, device=bin_XN.device)
    inside_XNC = probs_XV.gather(1, token_XNC.clamp(max=V - 1).flatten(1)).view(token_XNC.shape)
    inside_XNC = inside_XNC.masked_fill_(token_XNC >= V, 0.0)
    offset_XN1, _, _ = _pick(inside_XNC, share_XN[..., None])
    return (bin_XN * CDF_BIN + offset_XN1[..., 0]).clamp_(max=V - 1), total_X1


def _pick(mass_C: Tensor, uniforms_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First entries whose cumulative mass exceeds the numbers' shares of the total, all `(*, N)`; how far
    into the entry's own mass the numbers fall, in [0, 1); and the totals `(*, 1)`.
    """
    cdf_C = mass_C.cumsum(dim=-1)
    # Scaling by the last value keeps a uniform number below the total although sums are rounded.
    total_1 = cdf_C[..., -1:]
    target_N = uniforms_N * total_1
    entry_N = torch.searchsorted(cdf_C, target_N, right=True).clamp_(max=cdf_C.shape[-1] - 1)
    mass_N = mass_C.gather(-1, entry_N)
    share_N = (target_N - (cdf_C.gather(-1, entry_N) - mass_N)) / mass_N
    return entry_N, share_N.clamp_(0.0, 1.0 - torch.finfo(share_N.dtype).eps), total_1


def _nucleus(probs_XV: Tensor, top_p: float) -> Tensor:
    """Probabilities with everything outside the nucleus set to zero (the most likely token always stays)."""
    sorted_XV, order_XV = probs_XV.sort(dim=-1, descending=True)
    mass_before_XV = sorted_XV.cumsum(dim=-1) - sorted_XV
    kept_XV = sorted_XV.masked_fill(mass_before_XV >= top_p, 0.0)
    return torch.zeros_like(probs_XV).scatter(-1, order_XV, kept_XV)
