"""Let a model write answers to problems, with the sampler of structured mode in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from ebft_core.config import EBFTConfig, RunConfig
from ebft_core.config.tasks_section import GenerationTask
from ebft_core.data.document import RowError
from ebft_core.data.encoding import bos_prefix, encode, with_bos
from ebft_core.data.templates import end_of_turn, render
from ebft_core.errors import UserError
from ebft_core.evaluation.downstream.problems import Problem
from ebft_core.evaluation.sampling import Row
from ebft_core.samplers.generate import GenerateSampler
from ebft_core.samplers.prompts import Group, PromptRequest, Turn, request_of
from ebft_core.tokenizer import Tokenizer


@dataclass(frozen=True)
class Question:
    """A problem as the model reads it."""

    problem: Problem
    prompt_ids: list[int]


class Writer:
    """Everything but the model: the questions of a task, the tokens that end an answer.

    Args:
        questions: in their order; the number of one seeds its random numbers.
        stop_token_ids: tokens that end an answer.
    """

    def __init__(
        self,
        task: GenerationTask,
        questions: Sequence[Question],
        stop_token_ids: Sequence[int],
        tokenizer: Tokenizer,
        config: RunConfig,
    ) -> None:
        self.questions = questions
        self._task, self._tokenizer = task, tokenizer
        self._stops = frozenset(stop_token_ids)
        self._seed, self._rows = config.evaluate.seed, config.evaluate.batch_rows
        self._config = config.model_copy(update={"ebft": _sampling(task)})

    def write(self, policy: nn.Module, on_done: Callable[[int], None]) -> list[list[str]]:
        """The texts of `n_samples` answers to every question, cut at the first text of `stop`.

        Args:
            on_done: called with the number of questions that were just answered.

        Raises:
            UserError: the architecture is not supported, or a question leaves no room for its answer.
            FloatingPointError: the logits are not finite.
        """
        bound = self._task.max_tokens
        requests = [
            PromptRequest(number, question.prompt_ids, [Turn([], bound)], bound)
            for number, question in enumerate(self.questions)
        ]
        sampler = GenerateSampler(policy, self._config, sorted(self._stops), rows=self._rows)
        groups = sampler.sample(requests, seed=self._seed, version=0, on_group=lambda _: on_done(1))
        return [self._texts(group) for group in groups]

    def _texts(self, group: Group) -> list[str]:
        prompt_ids = self.questions[group.row_id].prompt_ids
        samples = [sample.token_ids for sample in group.samples if sample is not None]
        whole = [ids[:-1] if ids[-1] in self._stops else ids for ids in samples]
        return [cut_at(decode_behind(self._tokenizer, prompt_ids, ids), self._task.stop) for ids in whole]


def ask_problems(
    task: GenerationTask, problems: Sequence[Problem], tokenizer: Tokenizer, config: RunConfig
) -> Writer:
    """Problems of a file as questions: texts as they are, conversations in the model's template.

    Raises:
        UserError: a conversation, and the tokenizer has no usable template.
    """
    prefix = bos_prefix(tokenizer)
    stops = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    if task.chat or any(not isinstance(problem.prompt, str) for problem in problems):
        stops.append(end_of_turn(tokenizer, config.data).token_id)
    texts = [_text(problem, task, tokenizer, config) for problem in problems]
    questions = [
        Question(problem, with_bos(ids, prefix))
        for problem, ids in zip(problems, encode(tokenizer, texts), strict=True)
    ]
    return Writer(task, questions, stops, tokenizer, config)


def ask_rows(
    task: GenerationTask,
    rows: Sequence[Row],
    stop_token_ids: Sequence[int],
    tokenizer: Tokenizer,
    config: RunConfig,
) -> Writer:
    """Held-out examples as questions: everything before the first turn, which is the reference."""
    questions = []
    for row in rows[: task.limit]:
        request = request_of(row, config)
        start = len(request.prompt_ids)
        turn_ids = list(row["input_ids"][start : start + request.turns[0].reference_length])
        reference = decode_behind(tokenizer, request.prompt_ids, turn_ids)
        prompt = tokenizer.decode(request.prompt_ids)
        problem = Problem(prompt, str(row["document_hashes"][0]), references=(reference,))
        questions.append(Question(problem, request.prompt_ids))
    return Writer(task, questions, stop_token_ids, tokenizer, config)


def decode_behind(tokenizer: Tokenizer, prompt_ids: list[int], ids: list[int]) -> str:
    """The text of `ids` where they stand: alone, they may lose the space they begin with."""
    prompt = tokenizer.decode(prompt_ids, skip_special_tokens=True)
    return str(tokenizer.decode([*prompt_ids, *ids], skip_special_tokens=True))[len(prompt) :]


def cut_at(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first of `stops` that it holds."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]


def _sampling(task: GenerationTask) -> EBFTConfig:
    """The sampling parameters of a task; temperature 0 is a choice among one token."""
    greedy = task.temperature == 0
    return EBFTConfig(
        n_samples_per_prompt=task.n_samples,
        temperature=1.0 if greedy else task.temperature,
        top_k=1 if greedy else 0,
        top_p=task.top_p,
    )


def _text(problem: Problem, task: GenerationTask, tokenizer: Tokenizer, config: RunConfig) -> str:
    if isinstance(problem.prompt, str) and not task.chat:
        return problem.prompt
    said = problem.prompt
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    try:
        return render(messages, tokenizer, config.data, add_generation_prompt=True)
    except RowError as error:
        raise UserError(str(error), where=problem.origin) from error
