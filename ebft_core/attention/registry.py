"""Hands attention of a transformers model to a plan; see the package docstring."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

IMPLEMENTATION = "ebft"


class AttentionPlan(Protocol):
    """Computes the attention of one layer in place of the library."""

    def attend(
        self, layer: int, query_RHTK: Tensor, key_RJTK: Tensor, value_RJTK: Tensor, scale: float
    ) -> Tensor:
        """Attention output `(R, H, T, K)`; keys and values may have fewer heads (J) than queries (H)."""
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    ebft_plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if ebft_plan is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Under autocast a float32 model's rotary embedding returns float32, its projections the lower precision.
    query, key = query.to(value.dtype), key.to(value.dtype)
    output = ebft_plan.attend(int(module.layer_idx), query, key, value, scale)  # type: ignore[arg-type]
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def use_ebft_attention(model: nn.Module) -> None:
    """Set the `ebft` attention implementation on a transformers (or PEFT) model, once."""
    if model.config._attn_implementation != IMPLEMENTATION:  # type: ignore[union-attr]
        model.set_attn_implementation(IMPLEMENTATION)  # type: ignore[operator]


def run_backbone(
    backbone: nn.Module, input_ids_RT: Tensor, position_RT: Tensor, plan: AttentionPlan
) -> Tensor:
    """Last hidden states `(R, T, H)` of the model without its head, attention computed by `plan`."""
    # A 4-D mask makes the library skip building its own (it would be a dense T × T one); the plan ignores it.
    no_mask = torch.empty(1, 1, 1, 1, dtype=torch.bool, device=input_ids_RT.device)
    output = backbone(
        input_ids=input_ids_RT,
        position_ids=position_RT,
        attention_mask=no_mask,
        use_cache=False,
        ebft_plan=plan,
    )
    return output.last_hidden_state
