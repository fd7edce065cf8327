"""The paper's setting, used by every part of the benchmark."""

from __future__ import annotations

from ebft_core.config import EBFTConfig


def paper_setting() -> EBFTConfig:
    """stride 8, context 8, generate 8, N = 4, three feature layers, feature whitening, temperature 0.6."""
    return EBFTConfig(
        stride=8,
        context_length=8,
        generate_max_len=8,
        n_samples_per_prompt=4,
        temperature=0.6,
        feature_layers=[0.25, 0.5, 0.75],
        whitening="feature",
    )
