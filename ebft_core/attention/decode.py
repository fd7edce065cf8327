"""Attention of the rollout: the document is prefilled once, then every block grows by one token a step.

A step has one query per block. It attends to the shared document prefix and to its own block only, so
the scores are computed in two parts and joined in one softmax: blocks × prefix (a matrix product
over all blocks of a row), and blocks × own tokens (batched over blocks). Keys and values live in
buffers allocated once; nothing grows by concatenation. Legend: see `geometry.py`; B = A·N blocks,
J key/value heads, Q query heads per key/value head, K head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ebft_core.attention.chunks import additive
from ebft_core.attention.cpu import decode_attention
from ebft_core.geometry import PackedLayout
from ebft_core.masks import dense_mask

CHUNK_BLOCKS = {"cpu": 64, "cuda": 128}
"""Blocks per score matrix: neighbouring anchors share a prefix bound, so most masked scores are skipped."""

JOINED_ON = {"cpu"}
"""Devices where prefix and own tokens are two attentions, joined afterwards; elsewhere one softmax."""

DecodeChunk = tuple[slice, int, Tensor]
"""Blocks, the prefix length they look at, and that prefix's additive mask."""


@dataclass
class _LayerCache:
    key_prefix_RJLK: Tensor
    value_prefix_RJLK: Tensor
    key_own_RJBGK: Tensor
    value_own_RJBGK: Tensor


@dataclass
class PrefixCache:
    """Attention plan of a rollout: call the model once on the document, then once per step.

    Args:
        layout: the packed layout of the rollout.
        step: tokens already written to every block; None during the prefill. The sampler advances it.
    """

    layout: PackedLayout
    step: int | None = None
    _layers: dict[int, _LayerCache] = field(default_factory=dict)
    _chunks: list[DecodeChunk] = field(default_factory=list)
    _document_mask: Tensor | None = None

    def __post_init__(self) -> None:
        layout = self.layout
        if layout.document_masking:
            index_L = torch.arange(layout.length, device=layout.document_RT.device)
            self._document_mask = dense_mask(layout, index_L, index_L)

    def attend(
        self, layer: int, query_RHTK: Tensor, key_RJTK: Tensor, value_RJTK: Tensor, scale: float
    ) -> Tensor:
        """Attention output `(R, H, T, K)`: causal over the document, or one step of all blocks."""
        if self.step is None:
            return self._prefill(layer, query_RHTK, key_RJTK, value_RJTK, scale)
        return self._decode(layer, query_RHTK, key_RJTK, value_RJTK, scale)

    def _prefill(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        R, J, _, K = key.shape
        if not self._layers:
            folds = query.device.type in JOINED_ON
            self._chunks = _chunks_of(self.layout, query.dtype, query.shape[1] // J if folds else 1)
        own_shape = (R, J, self.layout.num_blocks, self.layout.block_length, K)
        self._layers[layer] = _LayerCache(key, value, key.new_empty(own_shape), value.new_empty(own_shape))
        groups = query.shape[1] // J
        if groups > 1:
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        mask = self._document_mask
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale
        )

    def _decode(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        cache, step = self._layers[layer], self.step
        assert step is not None
        cache.key_own_RJBGK[:, :, :, step] = key
        cache.value_own_RJBGK[:, :, :, step] = value
        R, J, B, K = key.shape
        if query.device.type in JOINED_ON:
            prefix = cache.key_prefix_RJLK, cache.value_prefix_RJLK
            own = cache.key_own_RJBGK[:, :, :, : step + 1], cache.value_own_RJBGK[:, :, :, : step + 1]
            return decode_attention(query, prefix, own, self._chunks, scale)
        query_RJQBK = query.view(R, J, -1, B, K) * scale
        outputs = [
            self._attend_chunk(cache, query_RJQBK[:, :, :, blocks], blocks, prefix, mask, step + 1)
            for blocks, prefix, mask in self._chunks
        ]
        return torch.cat(outputs, dim=3).reshape(R, -1, B, K)

    @staticmethod
    def _attend_chunk(
        cache: _LayerCache, query_RJQBK: Tensor, blocks: slice, prefix: int, mask: Tensor, steps: int
    ) -> Tensor:
        R, J, Q, B, K = query_RJQBK.shape
        key_RJPK = cache.key_prefix_RJLK[:, :, :prefix]
        value_RJPK = cache.value_prefix_RJLK[:, :, :prefix]
        key_RJBSK = cache.key_own_RJBGK[:, :, blocks, :steps]
        value_RJBSK = cache.value_own_RJBGK[:, :, blocks, :steps]
        prefix_scores = (query_RJQBK.reshape(R, J, Q * B, K) @ key_RJPK.transpose(-1, -2)).view(
            R, J, Q, B, prefix
        )
        own_scores = torch.einsum("rjqbk,rjbsk->rjqbs", query_RJQBK, key_RJBSK)
        scores = prefix_scores.new_empty((*own_scores.shape[:-1], prefix + steps), dtype=torch.float32)
        torch.add(prefix_scores, mask[:, :, None], out=scores[..., :prefix])
        scores[..., prefix:] = own_scores
        weights = scores.softmax(dim=-1).to(value_RJPK.dtype)
        from_prefix = (weights[..., :prefix].reshape(R, J, Q * B, prefix) @ value_RJPK).view(R, J, Q, B, K)
        return from_prefix + torch.einsum("rjqbs,rjbsk->rjqbk", weights[..., prefix:], value_RJBSK)


def _chunks_of(layout: PackedLayout, dtype: torch.dtype, groups: int) -> list[DecodeChunk]:
    """Chunks of neighbouring blocks; masks are repeated for query heads folded into the query axis."""
    device = layout.document_RT.device
    A, B = layout.anchors_RA.shape[1], layout.num_blocks
    last_A = layout.anchors_RA.amax(dim=0).cummax(dim=0).values.tolist() if A else []
    size = CHUNK_BLOCKS["cuda" if device.type == "cuda" else "cpu"]
    chunks = []
    for start in range(0, B, size):
        stop = min(B, start + size)
        prefix = max(1, int(last_A[(stop - 1) // layout.n_samples]))
        queries = layout.length + torch.arange(start, stop, device=device) * layout.block_length
        mask = additive(dense_mask(layout, queries, torch.arange(prefix, device=device)), dtype)
        chunks.append((slice(start, stop), prefix, mask.repeat(1, 1, groups, 1)))
    return chunks
