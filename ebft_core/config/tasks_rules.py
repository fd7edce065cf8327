"""Rules about `evaluate.tasks` that need only the run file; `evaluation/downstream/check.py` opens files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

from ebft_core.config.problem import Problem
from ebft_core.config.schema import RunConfig
from ebft_core.config.tasks_section import ExactMatchTask, GenerationTask, PassAtKTask


def _names(config: RunConfig) -> Iterator[Problem]:
    count = Counter(task.name for task in config.evaluate.tasks)
    for index, task in enumerate(config.evaluate.tasks):
        if count[task.name] > 1:
            yield Problem((_key(index, "name"),), "two tasks have the same name", task.name, "one name each")


def _problems(config: RunConfig) -> Iterator[Problem]:
    """Where the problems come from."""
    for index, task in enumerate(config.evaluate.tasks):
        if not isinstance(task, GenerationTask) or task.file is not None:
            continue
        if isinstance(task, PassAtKTask):
            yield Problem(
                (_key(index, "file"),),
                "held-out examples have no tests that a program could pass",
                expected="a file of JSON lines, each `{prompt, tests}`",
            )
        elif config.ebft.mode != "structured":
            yield Problem(
                (_key(index, "file"), "ebft.mode"),
                "the held-out documents of strided mode have no prompts",
                expected="a file of JSON lines, each `{prompt, reference}`, or `ebft.mode: structured`",
            )


def _sampling(config: RunConfig) -> Iterator[Problem]:
    for index, task in enumerate(config.evaluate.tasks):
        if not isinstance(task, GenerationTask):
            continue
        samples, most = _key(index, "n_samples"), max(task.k) if isinstance(task, PassAtKTask) else 1
        if task.n_samples < most:
            yield Problem(
                (samples, _key(index, "k")),
                f"pass@{most} needs {most} different completions of a problem",
                task.n_samples,
                f"≥ {most}, the largest `k`",
            )
        if task.n_samples > 1 and task.temperature == 0:
            yield Problem(
                (_key(index, "temperature"), samples),
                "at temperature 0 all completions of a problem are the same",
                task.temperature,
                "> 0, for example 0.8, or `n_samples: 1`",
            )


def _programs(config: RunConfig) -> Iterator[Problem]:
    for index, task in enumerate(config.evaluate.tasks):
        if isinstance(task, PassAtKTask) and task.chat and task.program == "continuation":
            yield Problem(
                (_key(index, "program"), _key(index, "chat")),
                "an answer in a chat does not go on where the prompt ends",
                task.program,
                "`program: fenced`, or `chat: false`",
            )


def _patterns(config: RunConfig) -> Iterator[Problem]:
    for index, task in enumerate(config.evaluate.tasks):
        if not isinstance(task, ExactMatchTask) or task.extract is None:
            continue
        try:
            re.compile(task.extract)
        except re.error as error:
            yield Problem(
                (_key(index, "extract"),),
                f"not a regular expression: {error}",
                task.extract,
                "a Python regex",
            )


def _key(index: int, name: str) -> str:
    return f"evaluate.tasks[{index}].{name}"


TASKS_RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    _names,
    _problems,
    _sampling,
    _programs,
    _patterns,
)
