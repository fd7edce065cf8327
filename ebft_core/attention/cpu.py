"""Packed attention on the CPU: every score that is needed once, nothing copied for the backward pass.

The attention of a chunk of generated queries (`chunks.py`) has two parts, which share no key: the
document prefix (one flash kernel call with a small mask) and the blocks' own tokens (tiny matrices,
batched over blocks). Each part yields an output o and a log-sum-exp z; they join as
o = Σ o_i · exp(z_i - z) with z = log Σ exp(z_i). The backward pass of each part needs only the joint o
and z, so autograd keeps queries, keys, values, o and z, and gradients are added in place. Query heads
that share a key/value head are folded into the query axis, so keys are never repeated.

The flash kernel is torch's own for CPU; it is called by its ATen name because the public function hides
the log-sum-exp. Legend: see `geometry.py`; J key/value heads, Q query heads per key/value head,
X queries of a chunk, P prefix tokens, B blocks of a chunk, S tokens of a block, K head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ebft_core.attention.chunks import Chunk, ChunkPlan

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def packed_attention(
    query_RHTK: Tensor, key_RJTK: Tensor, value_RJTK: Tensor, plan: ChunkPlan, scale: float
) -> Tensor:
    """Attention output of the queries under the mask rule; differentiable.

    Queries are the documents' tokens where the plan has no chunks, else the blocks' tokens, whose keys
    and values follow those of the documents: `(R, J, L + X, K)`.
    """
    return _PackedAttention.apply(query_RHTK, key_RJTK, value_RJTK, plan, scale)


def decode_attention(
    query_RHBK: Tensor,
    prefix: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    chunks: Sequence[tuple[slice, int, Tensor]],
    scale: float,
) -> Tensor:
    """Attention output `(R, H, B, K)` of one query per block; no gradient.

    Args:
        prefix: keys and values of the documents, `(R, J, L, K)`.
        own: keys and values of the blocks, `(R, J, B, S, K)`: the query's own token is the last.
        chunks: slices of blocks, how much of the prefix they see, and that part's mask,
            `(R, 1, Q·X, P)`.
    """
    R, H, B, K = query_RHBK.shape
    J = prefix[0].shape[1]
    o = torch.empty_like(query_RHBK, memory_format=torch.contiguous_format)
    z = torch.empty(R, H, B, dtype=torch.float32)
    key, value = prefix
    for blocks, end, mask in chunks:
        o[:, :, blocks], z[:, :, blocks] = _prefix(
            query_RHBK[:, :, blocks], key[:, :, :end], value[:, :, :end], mask, scale
        )
    query_RJBQK = query_RHBK.reshape(R, J, -1, B, K).transpose(2, 3)
    scores = (query_RJBQK @ own[0].transpose(-1, -2)).float() * scale
    own_z = scores.logsumexp(dim=-1)
    own_o = (scores - own_z[..., None]).exp_().to(o.dtype) @ own[1]
    own_o, own_z = own_o.transpose(2, 3).reshape(R, H, B, K), own_z.transpose(2, 3).reshape(R, H, B)
    return _join(o, z, own_o, own_z)[0].to(o.dtype)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: ChunkPlan, scale: float) -> Tensor:
        ctx.plan, ctx.scale = plan, scale
        if not plan.chunks:
            output, lse = _document_forward(query, key, value, plan, scale)
        else:
            output = torch.empty_like(query, memory_format=torch.contiguous_format)
            lse = torch.empty(query.shape[:3], dtype=torch.float32)
            for chunk in plan.chunks:
                own = slice(chunk.start - plan.length, chunk.stop - plan.length)
                output[:, :, own], lse[:, :, own] = _chunk_forward(
                    query[:, :, own], key, value, chunk, plan.block_length, scale
                )
        ctx.save_for_backward(query, key, value, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        plan, scale, (grad,) = ctx.plan, ctx.scale, gradients
        if not plan.chunks:
            return (*_document_backward((query, output, lse, grad), key, value, plan, scale), None, None)
        d_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        d_key, d_value = torch.zeros_like(key), torch.zeros_like(value)
        for chunk in plan.chunks:
            own = slice(chunk.start - plan.length, chunk.stop - plan.length)
            parts = tuple(x[:, :, own] for x in (query, output, lse, grad))
            d_query[:, :, own] = _chunk_backward(
                parts, key, value, d_key, d_value, chunk, plan.block_length, scale
            )
        return d_query, d_key, d_value, None, None


def _document_forward(
    query: Tensor, key: Tensor, value: Tensor, plan: ChunkPlan, scale: float
) -> tuple[Tensor, Tensor]:
    groups, mask = query.shape[1] // key.shape[1], plan.document_mask
    output, lse = _flash(
        query,
        _repeat(key, groups),
        _repeat(value, groups),
        0.0,
        mask is None,
        attn_mask=mask,
        scale=scale,
    )
    return output, lse


def _document_backward(
    parts: tuple[Tensor, ...], key: Tensor, value: Tensor, plan: ChunkPlan, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    query, output, lse, grad = parts
    groups, mask = query.shape[1] // key.shape[1], plan.document_mask
    d_query, d_key, d_value = _flash_backward(
        grad,
        query,
        _repeat(key, groups),
        _repeat(value, groups),
        output,
        lse,
        0.0,
        mask is None,
        attn_mask=mask,
        scale=scale,
    )
    if groups > 1:
        d_key, d_value = (x.unflatten(1, (-1, groups)).sum(dim=2) for x in (d_key, d_value))
    return d_query, d_key, d_value


def _chunk_forward(
    query: Tensor, key: Tensor, value: Tensor, chunk: Chunk, block_length: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Output `(R, H, X, K)` and log-sum-exp `(R, H, X)` of one chunk."""
    R, H, X, K = query.shape
    before = slice(0, chunk.prefix)
    prefix_o, prefix_z = _prefix(query, key[:, :, before], value[:, :, before], chunk.mask_R1XP, scale)
    scores = _own_scores(query, key, chunk, block_length, scale)
    own_z = scores.logsumexp(dim=-1)
    own_o = (scores - own_z[..., None]).exp().to(value.dtype) @ _blocks(value, chunk, block_length)[
        :, :, None
    ]
    return _join(prefix_o, prefix_z, own_o.reshape(R, H, X, K), own_z.reshape(R, H, X))


def _prefix(
    query: Tensor, key: Tensor, value: Tensor, mask_R1XP: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output `(R, H, X, K)` and log-sum-exp `(R, H, X)` over the documents; a mask row per folded query."""
    R, H, X, K = query.shape
    folded = _fold(query, key.shape[1])
    o, z = _flash(folded, key, value, 0.0, False, attn_mask=mask_R1XP, scale=scale)
    return o.reshape(R, H, X, K), z.reshape(R, H, X)


def _join(o: Tensor, z: Tensor, own_o: Tensor, own_z: Tensor) -> tuple[Tensor, Tensor]:
    """Two attentions over different keys as one."""
    joint = torch.logaddexp(z, own_z)
    return torch.addcmul(o * (z - joint).exp_()[..., None], own_o, (own_z - joint).exp_()[..., None]), joint


def _chunk_backward(
    parts: tuple[Tensor, ...],
    key: Tensor,
    value: Tensor,
    d_key: Tensor,
    d_value: Tensor,
    chunk: Chunk,
    block_length: int,
    scale: float,
) -> Tensor:
    """Gradient of the chunk's queries; those of keys and values are added to `d_key` and `d_value`."""
    query, output, lse, grad = parts
    R, H, X, K = query.shape
    J = key.shape[1]
    before = slice(0, chunk.prefix)
    dq, dk, dv = _flash_backward(
        _fold(grad, J),
        _fold(query, J),
        key[:, :, before],
        value[:, :, before],
        _fold(output, J),
        lse.reshape(R, J, -1),
        0.0,
        False,
        attn_mask=chunk.mask_R1XP,
        scale=scale,
    )
    d_key[:, :, before] += dk
    d_value[:, :, before] += dv
    shape = (R, J, H // J, -1, block_length)
    q, g = query.reshape(*shape, K), grad.reshape(*shape, K)
    weights = (_own_scores(query, key, chunk, block_length, scale) - lse.reshape(shape)[..., None]).exp()
    delta = (grad.float() * output.float()).sum(dim=-1).reshape(shape)[..., None]
    d_weights = (g @ _blocks(value, chunk, block_length)[:, :, None].transpose(-1, -2)).float()
    d_scores = (weights * (d_weights - delta) * scale).to(query.dtype)
    own = slice(chunk.start, chunk.stop)
    d_key[:, :, own] += (d_scores.transpose(-1, -2) @ q).sum(dim=2).reshape(R, J, X, K)
    d_value[:, :, own] += (weights.to(g.dtype).transpose(-1, -2) @ g).sum(dim=2).reshape(R, J, X, K)
    own_dq = d_scores @ _blocks(key, chunk, block_length)[:, :, None]
    return dq.reshape(R, H, X, K) + own_dq.reshape(R, H, X, K)


def _own_scores(query: Tensor, key: Tensor, chunk: Chunk, block_length: int, scale: float) -> Tensor:
    """Causal scores inside the blocks, `(R, J, Q, B, S, S)` float32."""
    R, H, _, K = query.shape
    J = key.shape[1]
    q = query.reshape(R, J, H // J, -1, block_length, K)
    scores = (q @ _blocks(key, chunk, block_length)[:, :, None].transpose(-1, -2)).float() * scale
    later = torch.ones(block_length, block_length, dtype=torch.bool).triu(1)
    return scores.masked_fill_(later, float("-inf"))


def _blocks(x: Tensor, chunk: Chunk, block_length: int) -> Tensor:
    """The chunk's own keys or values, `(R, J, B, S, K)`."""
    return x[:, :, chunk.start : chunk.stop].unflatten(2, (-1, block_length))


def _fold(x: Tensor, key_heads: int) -> Tensor:
    """`(R, H, X, K)` as `(R, J, Q·X, K)`: heads that share keys become more queries."""
    R, _, _, K = x.shape
    return x.reshape(R, key_heads, -1, K)


def _repeat(x: Tensor, groups: int) -> Tensor:
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)
