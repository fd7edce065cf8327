"""Rules of the section `retrain`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ebft_core.config.problem import Problem
from ebft_core.config.schema import RunConfig


def _new_documents(config: RunConfig) -> Iterator[Problem]:
    retrain = config.retrain
    if retrain.train_on == "new" and retrain.start_from == "base":
        yield Problem(
            ("retrain.train_on", "retrain.start_from"),
            "a model that begins at the base again would never learn from the older documents",
            retrain.train_on,
            "`retrain.train_on: all`, or `retrain.start_from: champion`",
        )


RETRAIN_RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (_new_documents,)
