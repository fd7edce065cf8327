"""The frozen feature network φ: hidden states of a few layers, normalised, pooled over a block.

Layers l_f = clamp(⌊frac_f · num_hidden_layers⌋, 1, num_hidden_layers); index 0 would be the embedding. The
network runs only up to the deepest of them, without the head. Each layer's pooled vector is
L2-normalised, the F vectors are concatenated and divided by √F, so ‖φ‖ = 1 and every inner product of
two features is a mean of F cosines.

A layer's index counts as in the library's `hidden_states`: entry `num_hidden_layers` is the state behind the
final norm. Legend: see `geometry.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ebft_core.attention import PackedAttention, run_backbone
from ebft_core.attention.packed import Backend
from ebft_core.geometry import count_positions, pack_layout
from ebft_core.model_parts import (
    adapters_disabled,
    backbone_of,
    decoder_layers,
    evaluation_mode,
    prepare_for_packing,
)

CONCAT_FRACTIONS = (0.25, 0.5, 0.75)
"""Positions that `concat` pools, as fractions of the block's length."""


def layer_indices(feature_layers: Sequence[float], num_hidden_layers: int) -> list[int]:
    """Indices l_f of the feature layers, 1 … num_hidden_layers."""
    return [min(max(int(fraction * num_hidden_layers), 1), num_hidden_layers) for fraction in feature_layers]


def extract_features(
    model: nn.Module,
    input_ids_RL: Tensor,
    anchors_RA: Tensor,
    tokens_RANG: Tensor,
    *,
    feature_layers: Sequence[float],
    embed_method: str,
    document_ids_RL: Tensor | None = None,
    attention: Backend = "sdpa",
) -> tuple[Tensor, Tensor]:
    """Features of every generated block and of every ground-truth block.

    Args:
        model: the feature network; a PEFT model runs with its adapters disabled.
        feature_layers: depths as fractions of the network, in (0, 1].
        embed_method: `last_token`; `mean_pooling`; `completion_mean` (mean over the actions, which in
            strided mode is every token of the block); `concat` (the positions ⌊q·G⌋ for q = ¼, ½, ¾,
            side by side, which makes H three times as wide).
        document_ids_RL: documents of packed rows, -1 = padding; None: one document per row.

    Returns:
        `phi_RAND` and `target_RAD`, float32, unit norm; zeros at anchors that are -1. Samples of a group
        with equal tokens get bit-equal features: whitening must see an exact duplicate.

    Raises:
        UserError: the architecture is not supported. ValueError: unknown `embed_method`.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32,
        ...     num_hidden_layers=4, num_attention_heads=2))
        >>> document_RL, tokens_RANG = torch.randint(0, 50, (1, 40)), torch.randint(0, 50, (1, 2, 3, 5))
        >>> phi_RAND, target_RAD = extract_features(model, document_RL, torch.tensor([[8, 16]]), tokens_RANG,
        ...     feature_layers=[0.25, 0.5, 0.75], embed_method="last_token")
        >>> phi_RAND.shape, target_RAD.shape
        (torch.Size([1, 2, 3, 48]), torch.Size([1, 2, 48]))
    """
    if embed_method not in POOLING:
        raise ValueError(f"unknown embed_method {embed_method!r}; known: {', '.join(POOLING)}")
    R, L = input_ids_RL.shape
    _, A, N, G = tokens_RANG.shape
    prepare_for_packing(model, count_positions(L, anchors_RA, G))
    layout = pack_layout(anchors_RA, N, G, L, document_ids_RL)
    packed_RT = torch.cat([input_ids_RL, tokens_RANG.reshape(R, A * N * G)], dim=1)
    offsets_G = torch.arange(G, device=anchors_RA.device)
    target_RX = (anchors_RA.clamp(min=0)[..., None] + offsets_G).clamp(max=L - 1).reshape(R, A * G)
    pool = POOLING[embed_method]

    def pooled(hidden_RTH: Tensor) -> tuple[Tensor, Tensor]:
        H = hidden_RTH.shape[-1]
        blocks_RANGH = hidden_RTH[:, L:].reshape(R, A, N, G, H)
        target_RAGH = hidden_RTH.gather(1, target_RX[..., None].expand(-1, -1, H)).view(R, A, G, H)
        return pool(blocks_RANGH), pool(target_RAGH)

    with torch.no_grad(), evaluation_mode(model), adapters_disabled(model):
        plan = PackedAttention(layout, attention)
        layers = layer_indices(feature_layers, len(decoder_layers(model)))
        states = _run_to_layers(
            model, layers, pooled, lambda: _run(model, packed_RT, layout.position_RT, plan)
        )
        phi_RAND = _join([states[layer][0] for layer in layers])
        target_RAD = _join([states[layer][1] for layer in layers])
    phi_RAND = _share_duplicates(phi_RAND, tokens_RANG)
    valid_RA1 = layout.valid_RA[..., None]
    return phi_RAND * valid_RA1[..., None], target_RAD * valid_RA1


def _run(model: nn.Module, packed_RT: Tensor, position_RT: Tensor, plan: PackedAttention) -> Tensor:
    return run_backbone(backbone_of(model), packed_RT, position_RT, plan)


class _DeepestLayerReached(Exception):  # noqa: N818 (not an error)
    """Ends the forward pass: no later layer is needed."""


def _run_to_layers(
    model: nn.Module,
    layers: Sequence[int],
    pooled: Callable[[Tensor], tuple[Tensor, Tensor]],
    forward: Callable[[], Tensor],
) -> dict[int, tuple[Tensor, Tensor]]:
    """Pooled states of the wanted layers. Each is pooled as it passes by, so only one (T, H) state lives."""
    modules = decoder_layers(model)
    states: dict[int, tuple[Tensor, Tensor]] = {}
    deepest = max(layers)

    def keep(layer: int) -> Callable[[nn.Module, object, object], None]:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            assert isinstance(hidden, Tensor)
            states[layer] = pooled(hidden)
            if layer == deepest:
                raise _DeepestLayerReached

        return hook

    inner = [layer for layer in set(layers) if layer < len(modules)]
    handles = [modules[layer - 1].register_forward_hook(keep(layer)) for layer in inner]
    try:
        last_hidden = forward()
        states[len(modules)] = pooled(last_hidden)
    except _DeepestLayerReached:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return states


def _join(layers: Sequence[Tensor]) -> Tensor:
    """Normalise each layer's vector, concatenate, divide by √F."""
    units = [torch.nn.functional.normalize(layer.float(), dim=-1, eps=1e-12) for layer in layers]
    return torch.cat(units, dim=-1) / len(units) ** 0.5


def _share_duplicates(phi_RAND: Tensor, tokens_RANG: Tensor) -> Tensor:
    """Give every sample the features of the first sample of its group that has the same tokens."""
    index = first_duplicates(tokens_RANG)[..., None].expand_as(phi_RAND)
    return phi_RAND.gather(2, index)


def first_duplicates(tokens_RANG: Tensor) -> Tensor:
    """`first_RAN`: for every sample, the index of the first sample of its group with equal tokens."""
    same_RANM = (tokens_RANG[..., :, None, :] == tokens_RANG[..., None, :, :]).all(dim=-1)
    return same_RANM.int().argmax(dim=-1)


def _last_token(hidden: Tensor) -> Tensor:
    return hidden[..., -1, :]


def _mean(hidden: Tensor) -> Tensor:
    return hidden.float().mean(dim=-2)


def _concat(hidden: Tensor) -> Tensor:
    G = hidden.shape[-2]
    return torch.cat([hidden[..., min(int(q * G), G - 1), :] for q in CONCAT_FRACTIONS], dim=-1)


POOLING: dict[str, Callable[[Tensor], Tensor]] = {
    "last_token": _last_token,
    "mean_pooling": _mean,
    "completion_mean": _mean,
    "concat": _concat,
}
"""`(…, G, H) -> (…, H or 3H)`."""
