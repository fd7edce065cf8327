"""Tasks of lm-evaluation-harness, where that package is installed; its own prompts, data sets and scores.

A task's data set comes from the hub or from where its definition says. The harness scores every problem; the
numbers of each problem are kept, so that models are compared in pairs as for the other tasks. Imports without
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebft_core.config import RunConfig
from ebft_core.config.tasks_section import LMEvalTask
from ebft_core.errors import UserError
from ebft_core.evaluation.records import ProblemScores, mean_of
from ebft_core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import nn

_NO_FILTER = "none"


def check_harness(task: LMEvalTask, where: str) -> None:
    """Refuse a task that the harness does not have.

    Args:
        where: key path of the task.

    Raises:
        UserError: naming what is missing.
    """
    if task.include_path is not None and not Path(task.include_path).expanduser().is_dir():
        raise UserError("no such folder", where=f"{where}.include_path", value=task.include_path)
    if task.task not in _task_manager(task.include_path).all_subtasks:
        raise UserError(
            "the harness has no such task",
            where=f"{where}.task",
            value=task.task,
            expected="the name of one task, not of a group",
            hint="`lm-eval ls subtasks` lists them",
        )


def run_harness(
    task: LMEvalTask, policy: nn.Module, tokenizer: Tokenizer, config: RunConfig
) -> dict[str, ProblemScores]:
    """The metrics of a task by the names of `task.measures`.

    Raises:
        UserError: the task does not have one of `task.metrics`, or less of it is better.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    seed = config.evaluate.seed
    results: Any = simple_evaluate(
        HFLM(pretrained=policy, tokenizer=tokenizer, batch_size=config.evaluate.batch_rows),
        tasks=[task.task],
        task_manager=_task_manager(task.include_path),
        num_fewshot=task.num_fewshot,
        limit=task.limit,
        bootstrap_iters=0,
        log_samples=True,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
    )
    names = dict(zip(dict.fromkeys(task.metrics), task.measures, strict=True))
    higher, samples = results["higher_is_better"][task.task], results["samples"][task.task]
    return {ours: _scores(theirs, higher, samples, task) for theirs, ours in names.items()}


def _scores(
    name: str, higher: Mapping[str, bool], samples: list[Mapping[str, Any]], task: LMEvalTask
) -> ProblemScores:
    metric, _, filtered = name.partition(",")
    chosen = [sample for sample in samples if sample["filter"] == (filtered or _NO_FILTER)]
    values = [sample.get(metric) for sample in sorted(chosen, key=lambda sample: int(sample["doc_id"]))]
    if not values or not higher.get(metric) or not all(isinstance(value, int | float) for value in values):
        filters = {str(sample["filter"]) for sample in samples}
        raise UserError(
            f"the task `{task.task}` has no such metric that is a mean over problems and better when higher",
            where=f"evaluate.tasks ({task.name})",
            value=name,
            expected=", ".join(sorted(key for key, better in higher.items() if better)),
            hint=f"filters: {', '.join(sorted(filters))}; one is named behind a comma",
        )
    return mean_of([float(value) for value in values if value is not None])


@cache
def _task_manager(include_path: str | None) -> Any:
    """The harness's index of tasks, which takes it a while to make."""
    from lm_eval.tasks import TaskManager

    folder = None if include_path is None else str(Path(include_path).expanduser())
    return TaskManager(include_path=folder)
