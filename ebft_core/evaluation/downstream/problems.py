"""The problems of a task, read from JSON lines: `{"prompt", "reference"}` or `{"prompt", "tests"}`.

`prompt` is a text or a list of messages `{role, content}`; `reference` a text or a list of texts that are all
right; `tests` Python source with assertions, or a list of such sources. With an `entry_point` the tests may
define `check(candidate)`, as those of HumanEval do. Other keys are not read. Imports without torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebft_core.config.tasks_section import GenerationTask, PassAtKTask
from ebft_core.errors import UserError
from ebft_core.evaluation.sandbox import Checks, parse_tests

Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        prompt: a text, or the messages of a conversation.
        origin: `file:line`.
        references: texts that are right.
        checks: tests of a program; None where there are references.
    """

    prompt: Prompt
    origin: str
    references: tuple[str, ...] = ()
    checks: Checks | None = None


def read_problems(task: GenerationTask, where: str) -> list[Problem]:
    """The first `limit` problems of a task's file.

    Args:
        where: key path of the task, for errors.

    Raises:
        UserError: the file cannot be read, a line is no problem of this task, or there is none.
    """
    assert task.file is not None  # a rule of the configuration sends tasks without a file elsewhere
    path = Path(task.file).expanduser()
    problems: list[Problem] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if len(problems) == task.limit:
                    break
                if line.strip():
                    problems.append(_problem(line, f"{path}:{number}", task))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "the problems cannot be read",
            where=f"{where}.file",
            value=task.file,
            expected="JSON lines in UTF-8",
            hint=str(error),
        ) from error
    if not problems:
        raise UserError("there is no problem in the file", where=f"{where}.file", value=task.file)
    return problems


def _problem(line: str, origin: str, task: GenerationTask) -> Problem:
    try:
        record = json.loads(line)
        if not isinstance(record, Mapping):
            raise ValueError("not a JSON object")
        prompt = _prompt(record)
        if not isinstance(task, PassAtKTask):
            return Problem(prompt, origin, references=tuple(_texts(record, "reference")))
        if task.program == "continuation" and not isinstance(prompt, str):
            raise ValueError("a list of messages needs `program: fenced`: no program goes on where it ends")
        return Problem(prompt, origin, checks=parse_tests(_tests(record)))
    except ValueError as error:
        second = "tests" if isinstance(task, PassAtKTask) else "reference"
        raise UserError(
            f"not a problem of the task `{task.name}`: {error}",
            where=origin,
            value=line.strip(),
            expected=f'{{"prompt": …, "{second}": …}}',
        ) from error


def _prompt(record: Mapping[str, Any]) -> Prompt:
    prompt = record.get("prompt")
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(_is_message(message) for message in prompt):
        return prompt
    raise ValueError("`prompt` is neither a text nor a list of {role, content}")


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _texts(record: Mapping[str, Any], name: str) -> list[str]:
    value = record.get(name)
    texts: list[Any] = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"`{name}` is neither a text nor a list of texts")
    return texts


def _tests(record: Mapping[str, Any]) -> str:
    source = "\n".join(_texts(record, "tests"))
    entry_point = record.get("entry_point")
    if entry_point is None:
        return source
    if not (isinstance(entry_point, str) and entry_point.isidentifier()):
        raise ValueError("`entry_point` is not the name of a function")
    return f"{source}\ncheck({entry_point})"
