"""The work a strided step cannot avoid, in floating-point operations.

Only linear layers are counted (a multiplication and an addition per weight and token); attention
scores, norms and the softmax are overhead on top. With P weights in the decoder's linear layers, H·V
in the head, and the legend of `geometry.py`, per row:

* rollout:  2·P·(L + (G-1)·A·N) + 2·H·V·(A + (G-1)·A·N)
* features: 2·P·(l_deepest / num_hidden_layers)·(L + A·N·G)
* update:   2·P·T + 2·H·V·S forward, with T = L + A·N·(G-1) tokens fed (a block's last token predicts
  nothing) and S = A + (G-1)·A·N scored positions; the backward pass costs twice the forward where all
  weights are trained, and once where they are frozen (LoRA).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ebft_core.features import layer_indices
from ebft_core.model_parts import backbone_of, decoder_layers, head_of


@dataclass(frozen=True)
class StepShape:
    """Sizes of a strided step: R rows of L tokens, A anchors each, N samples of G tokens."""

    rows: int
    length: int
    anchors: int
    n_samples: int
    generate_max_len: int

    @property
    def generated(self) -> int:
        """Generated tokens of the step."""
        return self.rows * self.anchors * self.n_samples * self.generate_max_len


@dataclass(frozen=True)
class ModelCost:
    """Weights of the linear layers: of all decoder layers, and of the head."""

    decoder: int
    head: int
    num_hidden_layers: int
    trains_all: bool

    @classmethod
    def of(cls, model: nn.Module) -> ModelCost:
        """Count the matrices of a causal language model (adapters excluded)."""
        backbone = backbone_of(model)
        layers = decoder_layers(model)
        matrices = [
            p
            for name, p in layers.named_parameters()
            if p.dim() == 2 and "lora_" not in name and "norm" not in name
        ]
        head = next(p for p in head_of(model).parameters() if p.dim() == 2)
        return cls(
            decoder=sum(p.numel() for p in matrices),
            head=head.numel(),
            num_hidden_layers=len(layers),
            trains_all=all(p.requires_grad for p in backbone.parameters()),
        )


@dataclass(frozen=True)
class StepFlops:
    """Floating-point operations of the three phases."""

    rollout: float
    features: float
    update: float


def step_flops(model: ModelCost, shape: StepShape, feature_layers: list[float]) -> StepFlops:
    """Operations of one step, all rows together."""
    blocks = shape.anchors * shape.n_samples
    fed_again = (shape.generate_max_len - 1) * blocks
    scored = shape.anchors + fed_again
    depth = max(layer_indices(feature_layers, model.num_hidden_layers)) / model.num_hidden_layers
    forward = 2.0 * model.decoder * (shape.length + fed_again) + 2.0 * model.head * scored
    return StepFlops(
        rollout=shape.rows * forward,
        features=shape.rows * 2.0 * model.decoder * depth * (shape.length + blocks * shape.generate_max_len),
        update=shape.rows * forward * (3.0 if model.trains_all else 2.0),
    )
