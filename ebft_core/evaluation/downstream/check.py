"""What can be found out about the tasks before anything runs: their files, the sandbox, the harness."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from ebft_core.config import RunConfig
from ebft_core.config.tasks_section import GenerationTask, LMEvalTask, PassAtKTask
from ebft_core.errors import UserError
from ebft_core.evaluation.downstream.harness_tasks import check_harness
from ebft_core.evaluation.downstream.problems import read_problems
from ebft_core.evaluation.sandbox import check_sandbox
from ebft_core.manifests import sha256_file


def needs_sandbox(config: RunConfig) -> bool:
    """Whether a task runs programs that a model wrote."""
    return any(isinstance(task, PassAtKTask) for task in config.evaluate.tasks)


def check_tasks(config: RunConfig) -> None:
    """Read every problem, try the sandbox if one is needed, ask the harness for its tasks.

    Raises:
        UserError: a task could not be done.
    """
    if needs_sandbox(config):
        check_sandbox()
    for index, task in enumerate(config.evaluate.tasks):
        where = f"evaluate.tasks[{index}]"
        if isinstance(task, LMEvalTask):
            check_harness(task, where)
        elif task.file is not None:
            read_problems(task, where)


def digest_tasks(config: RunConfig) -> dict[str, str]:
    """What the tasks read beside the run file: digests of their files, the version of the harness.

    Raises:
        UserError: there is no such file.
    """
    found = {}
    for index, task in enumerate(config.evaluate.tasks):
        where = f"evaluate.tasks[{index}]"
        if isinstance(task, LMEvalTask):
            found[where] = _harness_version(where)
        elif isinstance(task, GenerationTask) and task.file is not None:
            path = Path(task.file).expanduser()
            if not path.is_file():
                raise UserError("no such file", where=f"{where}.file", value=task.file)
            found[where] = sha256_file(path)
    return found


def _harness_version(where: str) -> str:
    try:
        return metadata.version("lm-eval")
    except metadata.PackageNotFoundError as error:
        raise UserError(
            "lm-evaluation-harness is not installed",
            where=f"{where}.type",
            hint='install it with `pip install "ebft[lm-eval]"`',
        ) from error
