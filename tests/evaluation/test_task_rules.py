"""Rules of `evaluate.tasks`: each broken alone, with the key it points at."""

from __future__ import annotations

from typing import Any

import pytest

from ebft_core.config import RunConfig, parse_config
from ebft_core.config.schema_view import describe, keys_at, node_at
from ebft_core.errors import UserErrors

EXACT = {"type": "exact_match", "name": "a", "file": "a.jsonl"}
CODE = {"type": "pass_at_k", "name": "a", "file": "a.jsonl"}

BROKEN: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "no kind": ([{"name": "a"}], "evaluate.tasks[0].type", "is required"),
    "another kind": ([{**EXACT, "type": "exact"}], "evaluate.tasks[0].type", "does not take this value"),
    "key of another kind": ([{**EXACT, "k": [1]}], "evaluate.tasks[0].k", "unknown key"),
    "bad value": ([EXACT, {**CODE, "name": "b", "k": [0]}], "evaluate.tasks[1].k[0]", "out of range"),
    "bad name": ([{**EXACT, "name": "a/b"}], "evaluate.tasks[0].name", "not allowed"),
    "no reference": ([{**EXACT, "file": None}], "evaluate.tasks[0].file", "have no prompts"),
    "no tests": ([{**CODE, "file": None}], "evaluate.tasks[0].file", "have no tests"),
    "too few samples": ([{**CODE, "k": [1, 5]}], "evaluate.tasks[0].n_samples", "pass@5 needs 5"),
    "equal samples": ([{**EXACT, "n_samples": 2}], "evaluate.tasks[0].temperature", "are the same"),
    "chat goes on": ([{**CODE, "chat": True}], "evaluate.tasks[0].program", "does not go on"),
    "bad pattern": ([{**EXACT, "extract": "("}], "evaluate.tasks[0].extract", "not a regular expression"),
}


def parsed(tasks: list[dict[str, Any]], **sections: Any) -> RunConfig:
    data = {"sources": [{"path": "a.jsonl"}], "transform": sections.pop("transform", "text")}
    return parse_config(
        {"model": {"name_or_path": "m"}, "data": data, "evaluate": {"tasks": tasks}, **sections}
    )


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_the_one_error(case: str) -> None:
    tasks, where, what = BROKEN[case]
    with pytest.raises(UserErrors) as caught:
        parsed(tasks)
    (error,) = caught.value.errors
    assert error.where == where
    assert what in error.what
    assert error.expected


def test_two_tasks_of_one_name() -> None:
    with pytest.raises(UserErrors) as caught:
        parsed([EXACT, CODE])
    assert [error.where for error in caught.value.errors] == [f"evaluate.tasks[{i}].name" for i in (0, 1)]


def test_what_is_allowed() -> None:
    own = {"type": "exact_match", "name": "own"}
    parsed([own], ebft={"mode": "structured"}, transform="prompt_completion")
    tasks = [
        {**EXACT, "n_samples": 4, "temperature": 0.8},
        {**CODE, "name": "b", "n_samples": 4, "temperature": 0.8, "k": [4, 1]},
        {"type": "text_overlap", "name": "c", "file": "c.jsonl", "metrics": ["chrf"]},
        {"type": "lm_eval", "name": "d", "task": "gsm8k", "metrics": ["exact_match,strict-match"]},
    ]
    measures = [task.measures for task in parsed(tasks).evaluate.tasks]
    assert measures == [
        ("exact_match",),
        ("pass_at_1", "pass_at_4"),
        ("chrf",),
        ("exact_match.strict-match",),
    ]


def test_the_gate_may_use_a_metric_that_a_task_measures() -> None:
    parsed([CODE], promotion={"metric": "tasks/a/pass_at_1", "guards": {"ce": 0.1}})
    with pytest.raises(UserErrors) as caught:
        parsed([CODE], promotion={"guards": {"tasks/a/pass_at_5": 0.1}})
    (error,) = caught.value.errors
    assert "tasks/a/pass_at_1" in str(error.expected)


def test_the_schema_knows_every_kind() -> None:
    item = ("evaluate", "tasks", 0)
    assert {"k", "extract", "tokenize", "num_fewshot"} <= set(keys_at(item))
    kind = node_at((*item, "type"))
    assert kind is not None
    assert describe(kind) == "one of: exact_match, lm_eval, pass_at_k, text_overlap"
