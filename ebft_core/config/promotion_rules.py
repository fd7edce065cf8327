"""Rules of the section `promotion`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ebft_core.config.problem import Problem
from ebft_core.config.schema import RunConfig
from ebft_core.metrics import METRICS, TASK_PREFIX

DIRECTED = tuple(name for name, metric in METRICS.items() if metric.better is not None)


def _metrics(config: RunConfig) -> Iterator[Problem]:
    promotion = config.promotion
    asked = {
        "promotion.metric": promotion.metric,
        "compare.metric": config.compare.metric,
        "sweep.metric": config.sweep.metric,
    }
    asked |= {f"promotion.guards.{name}": name for name in promotion.guards}
    for key, name in asked.items():
        if name not in _directed(config):
            yield Problem(
                (key,),
                "no metric of the evaluation that can be better or worse",
                name,
                ", ".join(_directed(config)),
            )


def _directed(config: RunConfig) -> list[str]:
    """The metrics that the evaluation of this run has and that can be better or worse."""
    tasks = config.evaluate.tasks
    return [*DIRECTED, *(f"{TASK_PREFIX}{task.name}/{name}" for task in tasks for name in task.measures)]


def _aliases(config: RunConfig) -> Iterator[Problem]:
    if config.publish.alias == config.promotion.champion_alias:
        yield Problem(
            ("publish.alias", "promotion.champion_alias"),
            "publishing would make every model the champion, before the gate has judged it",
            config.publish.alias,
            "two different aliases",
        )


PROMOTION_RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (_metrics, _aliases)
