"""Exponential moving average of the trained weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """Name → parameter of everything that is trained."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def load_trainable(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy saved values into the trained parameters.

    Raises:
        ValueError: the names differ: the checkpoint belongs to another model or configuration.
    """
    parameters = trainable_state(model)
    if parameters.keys() != state.keys():
        raise ValueError(f"checkpoint and model differ in {sorted(parameters.keys() ^ state.keys())[:5]}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])


class WeightAverage:
    """average ← decay · average + (1 - decay) · weights, after every optimiser step."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.average = {name: value.detach().clone() for name, value in trainable_state(model).items()}

    def update(self, model: nn.Module) -> None:
        """Move the average towards the model's present weights."""
        with torch.no_grad():
            for name, value in trainable_state(model).items():
                self.average[name].lerp_(value, 1.0 - self.decay)
