"""All tasks of a run on one model after the other: `Suite` is made once, `measure` called for every model.

Every model gets the same prompts and the same random numbers, and every metric keeps one column of
statistics per problem, so that models are compared in pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ebft_core.config import RunConfig
from ebft_core.config.tasks_section import (
    ExactMatchTask,
    GenerationTask,
    LMEvalTask,
    PassAtKTask,
    TextOverlapTask,
)
from ebft_core.evaluation.downstream.harness_tasks import run_harness
from ebft_core.evaluation.downstream.problems import read_problems
from ebft_core.evaluation.downstream.programs import run_programs
from ebft_core.evaluation.downstream.scoring import (
    exact_match,
    overlap_scores,
    pass_at_k,
    program_of,
)
from ebft_core.evaluation.downstream.writing import Writer, ask_problems, ask_rows
from ebft_core.evaluation.records import AnswerRecord, ProblemScores, mean_of
from ebft_core.evaluation.sampling import Row
from ebft_core.metrics import TASK_PREFIX
from ebft_core.tokenizer import Tokenizer

OnDone = Callable[[int], None]
"""Called with the number of problems that were just answered, which may be 0."""

Answers = Sequence[Sequence[str]]
"""The texts of each problem's answers."""

Scored = tuple[dict[str, ProblemScores], Sequence[Sequence[str]]]
"""Metric → scores, and the verdicts on the answers to each problem."""


RIGHT = "right"
"""The verdict on an answer that is."""


class Suite:
    """The tasks of `evaluate.tasks`, ready for any model with this tokenizer.

    Args:
        rows: held-out rows, for the tasks without a file.
        stop_token_ids: tokens that end a turn of a held-out completion.

    Raises:
        UserError: a file is not what its task needs, or the tokenizer has no usable chat template.
    """

    def __init__(
        self, config: RunConfig, tokenizer: Tokenizer, rows: Sequence[Row], stop_token_ids: Sequence[int]
    ) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._writers: dict[str, Writer] = {}
        for index, task in enumerate(config.evaluate.tasks):
            if isinstance(task, GenerationTask) and task.file is None:
                self._writers[task.name] = ask_rows(task, rows, stop_token_ids, tokenizer, config)
            elif isinstance(task, GenerationTask):
                problems = read_problems(task, f"evaluate.tasks[{index}]")
                self._writers[task.name] = ask_problems(task, problems, tokenizer, config)

    @property
    def problems(self) -> int:
        """Problems in all; a task of the harness counts as one."""
        harness = len(self._config.evaluate.tasks) - len(self._writers)
        return sum(len(writer.questions) for writer in self._writers.values()) + harness

    def measure(
        self, policy: nn.Module, on_done: OnDone
    ) -> tuple[dict[str, ProblemScores], list[AnswerRecord]]:
        """The metrics of a model by their whole names, `tasks/<task>/<metric>`, and its answers.

        Raises:
            UserError: the architecture is not supported, or a prompt leaves no room for its answer.
            SandboxError: the sandbox did not come up.
        """
        scores: dict[str, ProblemScores] = {}
        answers: list[AnswerRecord] = []
        for task in self._config.evaluate.tasks:
            if isinstance(task, LMEvalTask):
                found = run_harness(task, policy, self._tokenizer, self._config)
                on_done(1)
            else:
                writer = self._writers[task.name]
                texts = writer.write(policy, on_done)
                found, verdicts = self._score(task, writer, texts, on_done)
                answers += _records(task.name, writer, texts, verdicts)
            scores |= {f"{TASK_PREFIX}{task.name}/{name}": value for name, value in found.items()}
        return scores, answers

    def _score(self, task: GenerationTask, writer: Writer, texts: Answers, on_done: OnDone) -> Scored:
        references = [question.problem.references for question in writer.questions]
        if isinstance(task, PassAtKTask):
            return self._solved(task, writer, texts, on_done)
        if isinstance(task, TextOverlapTask):
            return overlap_scores(texts, references, task), [()] * len(texts)
        assert isinstance(task, ExactMatchTask)
        right = [
            [exact_match(text, wanted, task) for text in answers]
            for answers, wanted in zip(texts, references, strict=True)
        ]
        verdicts = [[RIGHT if one else "wrong" for one in row] for row in right]
        return {"exact_match": mean_of([sum(row) / len(row) for row in right])}, verdicts

    def _solved(self, task: PassAtKTask, writer: Writer, texts: Answers, on_done: OnDone) -> Scored:
        jobs = [
            (program_of(str(question.problem.prompt), text, task), question.problem.checks)
            for question, answers in zip(writer.questions, texts, strict=True)
            for text in answers
            if question.problem.checks is not None
        ]
        # No problem is done by a verdict, but the caller may want to stop.
        found = iter(run_programs(jobs, self._config.evaluate.sandbox, lambda: on_done(0)))
        verdicts = [[next(found) for _ in answers] for answers in texts]
        passed = [sum(verdict.passed for verdict in row) for row in verdicts]
        scores = {
            f"pass_at_{k}": mean_of([pass_at_k(task.n_samples, count, k) for count in passed])
            for k in sorted(set(task.k))
        }
        return scores, [[RIGHT if one.passed else one.reason for one in row] for row in verdicts]


def _records(
    task: str, writer: Writer, texts: Answers, verdicts: Sequence[Sequence[str]]
) -> Iterator[AnswerRecord]:
    for question, answers, judged in zip(writer.questions, texts, verdicts, strict=True):
        problem = question.problem
        prompt = problem.prompt if isinstance(problem.prompt, str) else _talk(problem.prompt)
        expected = "\n".join(problem.references) if problem.checks is None else problem.checks.written
        yield AnswerRecord(task, problem.origin, prompt, expected, tuple(answers), tuple(judged))


def _talk(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
