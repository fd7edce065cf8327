"""Attention over packed rows, as one more implementation beside the library's own.

`use_ebft_attention(model)` sets the implementation called `ebft` on a transformers model. Without a
plan it is exactly the library's SDPA, so a model that carries it stays an ordinary model (`generate`,
plain forwards, saving). With a plan in the forward's keyword arguments the plan computes attention:

* `DocumentAttention`, then `BlockAttention` (packed.py): the packed, differentiable forward in two phases;
* `PrefixCache` (decode.py): prefill of the document, then one step per generated token.

The plan travels as an argument, not as a global, so that gradient checkpointing finds it again when
it recomputes a layer during the backward pass.
"""

from ebft_core.attention.decode import PrefixCache
from ebft_core.attention.packed import Backend, BlockAttention, DocumentAttention, KeyValues
from ebft_core.attention.registry import run_backbone, use_ebft_attention

__all__ = [
    "Backend",
    "BlockAttention",
    "DocumentAttention",
    "KeyValues",
    "PrefixCache",
    "run_backbone",
    "use_ebft_attention",
]
