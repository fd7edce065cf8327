"""The section `retrain` of a run file: what the flow `ebft-retrain` begins with and learns from."""

from __future__ import annotations

from typing import Literal

from ebft_core.config.section import Section


class RetrainConfig(Section):
    """Retraining when there is new data. Where no champion is yet, the base model is trained on all data."""

    start_from: Literal["champion", "base"] = "champion"
    """`champion`: each training goes on from the model in use. `base`: each begins at the base model."""
    train_on: Literal["all", "new"] = "all"
    """`all`: every document of the sources. `new`: those that no model on the way to the champion was trained
    on."""
