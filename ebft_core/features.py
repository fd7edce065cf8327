"""The frozen feature network φ: hidden states of a few layers, normalised, pooled over a block.

Layers l_f = clamp(⌊frac_f · num_hidden_layers⌋, 1, num_hidden_layers); index 0 would be the embedding. The
network runs only up to the deepest of them, without the head. Each layer's pooled vector is
L2-normalised, the F vectors are concatenated and divided by √F, so ‖φ‖ = 1 and every inner product of
two features is a mean of F cosines. The documents run once, and each distinct rollout of a group once:
whitening must see exact duplicates, and equal tokens computed twice differ in bfloat16.

A layer's index counts as in the library's `hidden_states`: entry `num_hidden_layers` is the state behind the
final norm. Legend: see `geometry.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ebft_core.attention import Backend
from ebft_core.blocks import Blocks, choose_blocks, first_duplicates, parts_of
from ebft_core.forward import Documents, Phase, block_phase, document_phase, tokens_per_forward
from ebft_core.geometry import NO_ANCHOR, count_positions
from ebft_core.model_parts import (
    adapters_disabled,
    backbone_of,
    decoder_layers,
    evaluation_mode,
    prepare_for_packing,
)
from ebft_core.pooling import POOLING, PoolingRule

States = dict[int, Tensor]
"""Pooled states of the feature layers, by layer index."""


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
    blocks: Blocks | None = None,
    target_length_RA: Tensor | None = None,
    target_action_RL: Tensor | None = None,
    max_tokens: int | None = None,
    share_prefixes: bool = True,
) -> tuple[Tensor, Tensor]:
    """Features of every generated block and of every ground-truth block.

    Args:
        model: the feature network; a PEFT model runs with its adapters disabled.
        feature_layers: depths as fractions of the network, in (0, 1].
        embed_method: `last_token`; `mean_pooling`; `completion_mean` (mean over the actions, which in
            strided mode is every token of the block); `concat` (the positions ⌊q·length⌋ for q = ¼, ½, ¾,
            side by side, which makes H three times as wide).
        document_ids_RL: documents of packed rows, -1 = padding; None: one document per row.
        blocks: lengths and actions of the blocks; None: every block has G tokens, all of them actions.
        target_length_RA: tokens of each ground-truth block; None: G.
        target_action_RL: document tokens that the policy would have written; None: all.
        max_tokens: block tokens per forward pass; None: what suits the device.
        share_prefixes: samples that begin alike are computed once as far as they do.

    Returns:
        `phi_RAND` and `target_RAD`, float32, unit norm; zeros at anchors that are -1 and at empty blocks.
        Samples of a group with equal tokens get bit-equal features.

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
    states = feature_states(
        model,
        input_ids_RL,
        anchors_RA,
        Blocks.full(tokens_RANG, anchors_RA) if blocks is None else blocks,
        feature_layers=feature_layers,
        embed_method=embed_method,
        document_ids_RL=document_ids_RL,
        attention=attention,
        target_length_RA=target_length_RA,
        target_action_RL=target_action_RL,
        max_tokens=max_tokens,
        share_prefixes=share_prefixes,
    )
    return _join(states.samples), _join(states.targets)


@dataclass(frozen=True)
class FeatureStates:
    """Pooled hidden states, before normalisation; zeros at anchors that are -1 and at empty blocks.

    Attributes:
        samples: per feature layer, `(R, A, N, H)` (or 3H).
        targets: per feature layer, `(R, A, H)`.
        first_RAN: for every sample, the first sample of its group with equal tokens.
    """

    samples: list[Tensor]
    targets: list[Tensor]
    first_RAN: Tensor


def feature_states(
    model: nn.Module,
    input_ids_RL: Tensor,
    anchors_RA: Tensor,
    blocks: Blocks,
    *,
    feature_layers: Sequence[float],
    embed_method: str,
    document_ids_RL: Tensor | None = None,
    attention: Backend = "sdpa",
    target_length_RA: Tensor | None = None,
    target_action_RL: Tensor | None = None,
    max_tokens: int | None = None,
    share_prefixes: bool = True,
) -> FeatureStates:
    """What features are made of; arguments and errors as in `extract_features`."""
    if embed_method not in POOLING:
        raise ValueError(f"unknown embed_method {embed_method!r}; known: {', '.join(POOLING)}")
    L, G = input_ids_RL.shape[1], blocks.tokens_RANG.shape[3]
    length_RA = torch.full_like(anchors_RA, G) if target_length_RA is None else target_length_RA
    valid_RA = anchors_RA != NO_ANCHOR
    rule = POOLING[embed_method]
    prepare_for_packing(model, count_positions(L, anchors_RA, G))
    with torch.no_grad(), evaluation_mode(model), adapters_disabled(model):
        layers = layer_indices(feature_layers, len(decoder_layers(model)))
        phase, documents = document_phase(input_ids_RL, document_ids_RL, attention)
        where = _target_pooling(rule, anchors_RA, length_RA, target_action_RL, L)
        targets = _run_to_layers(model, layers, phase, *where)
        samples = _block_states(
            model, layers, rule, documents, anchors_RA, blocks, max_tokens, share_prefixes
        )
    return FeatureStates(
        [samples[layer] for layer in layers],
        [targets[layer] * valid_RA[..., None] for layer in layers],
        first_duplicates(blocks.tokens_RANG, blocks.length_RAN),
    )


def _target_pooling(
    rule: PoolingRule, anchors_RA: Tensor, length_RA: Tensor, action_RL: Tensor | None, length: int
) -> tuple[Tensor, Tensor | None]:
    """Document positions `(R, A, P)` of the ground-truth blocks, and their weights."""
    width = int(length_RA.max()) if length_RA.numel() else 1
    span_RAS = anchors_RA.clamp(min=0)[..., None] + torch.arange(width, device=anchors_RA.device)
    span_RAS = span_RAS.clamp(max=length - 1)
    if action_RL is None:
        action_RAS = torch.ones_like(span_RAS, dtype=torch.bool)
    else:
        action_RAS = action_RL[:, None].expand(-1, anchors_RA.shape[1], -1).gather(2, span_RAS)
    offset_RAP, weight_RAP = rule(length_RA, action_RAS)
    return span_RAS.gather(2, offset_RAP), weight_RAP


def _block_states(
    model: nn.Module,
    layers: Sequence[int],
    rule: PoolingRule,
    documents: Documents,
    anchors_RA: Tensor,
    blocks: Blocks,
    max_tokens: int | None,
    share_prefixes: bool,
) -> States:
    """Pooled states `(R, A, N, …)` of all blocks, each distinct block computed once."""
    first_RAN = first_duplicates(blocks.tokens_RANG, blocks.length_RAN)
    wanted_RAN = (anchors_RA >= 0)[..., None] & (blocks.length_RAN > 0)
    choice = choose_blocks(first_RAN, wanted_RAN, blocks.length_RAN)
    N = first_RAN.shape[2]
    anchors_RX = choice.pick_anchors(anchors_RA, N)
    tokens_RXG, length_RX = choice.pick(blocks.tokens_RANG), choice.pick(blocks.length_RAN)
    action_RXG = choice.pick(blocks.action_RANG)
    limit = tokens_per_forward(tokens_RXG.device, max_tokens)
    collected: list[States] = []
    for part in parts_of(anchors_RX, tokens_RXG.shape[2], limit):
        width = max(1, int(length_RX[:, part].max()))
        phase = block_phase(
            documents, anchors_RX[:, part], tokens_RXG[:, part, :width], share_prefixes=share_prefixes
        )
        where = _block_pooling(rule, length_RX[:, part], action_RXG[:, part, :width])
        collected.append(_run_to_layers(model, layers, phase, *where))
    if not collected:
        hidden_size = int(backbone_of(model).config.hidden_size)  # type: ignore[union-attr, arg-type]
        nothing = torch.zeros(*first_RAN.shape, hidden_size, device=first_RAN.device)
        return dict.fromkeys(layers, nothing)
    return {
        layer: choice.spread(torch.cat([states[layer] for states in collected], dim=1), N) for layer in layers
    }


def _block_pooling(rule: PoolingRule, length_RX: Tensor, action_RXG: Tensor) -> tuple[Tensor, Tensor | None]:
    """Packed positions `(R, X, P)` of blocks of equal width, and their weights."""
    _, X, G = action_RXG.shape
    offset_RXP, weight_RXP = rule(length_RX, action_RXG)
    return offset_RXP + torch.arange(X, device=length_RX.device)[:, None] * G, weight_RXP


def _pool(hidden_RTH: Tensor, position_RXP: Tensor, weight_RXP: Tensor | None) -> Tensor:
    """Hidden states at the positions, `(R, X, P·H)`; with weights their weighted sum, `(R, X, H)`."""
    rows_R11 = torch.arange(hidden_RTH.shape[0], device=hidden_RTH.device)[:, None, None]
    picked_RXPH = hidden_RTH[rows_R11, position_RXP]
    if weight_RXP is None:
        return picked_RXPH.flatten(2)
    return torch.einsum("rxph,rxp->rxh", picked_RXPH.float(), weight_RXP)


class _DeepestLayerReached(Exception):  # noqa: N818 (not an error)
    """Ends the forward pass: no later layer is needed."""


def _run_to_layers(
    model: nn.Module, layers: Sequence[int], phase: Phase, position_RXP: Tensor, weight_RXP: Tensor | None
) -> States:
    """Pooled states of the wanted layers. Each is pooled as it passes by, so only one (T, H) state lives."""
    modules = decoder_layers(model)
    states: States = {}
    deepest = max(layers)

    def keep(layer: int) -> Callable[[nn.Module, object, object], None]:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            assert isinstance(hidden, Tensor)
            states[layer] = _pool(phase.spread(hidden), position_RXP, weight_RXP)
            if layer == deepest:
                raise _DeepestLayerReached

        return hook

    inner = [layer for layer in set(layers) if layer < len(modules)]
    handles = [modules[layer - 1].register_forward_hook(keep(layer)) for layer in inner]
    try:
        states[len(modules)] = _pool(phase.run(model), position_RXP, weight_RXP)
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
