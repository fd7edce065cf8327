"""The sections `evaluate.tasks` and `evaluate.sandbox`: what the finished models are asked to do."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ebft_core.config.section import Fraction, NonNegativeInt, PositiveInt, Section

TASK_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class GenerationTask(Section):
    """What all tasks share for which the models write."""

    name: str = Field(pattern=TASK_NAME)
    """Name of the task: its metrics are `tasks/<name>/<metric>`."""
    file: str | None = None
    """JSON lines with one problem each. Unset: the run's held-out examples (structured mode), of which the
    first turn is asked for."""
    limit: PositiveInt | None = None
    """Use only the first problems; unset: all."""
    n_samples: PositiveInt = 1
    """Completions of every problem."""
    temperature: float = Field(default=0.0, ge=0.0)
    """Sampling temperature; 0: always the most likely token."""
    top_p: Fraction = 1.0
    """Nucleus sampling bound; 1.0 is off."""
    max_tokens: PositiveInt = 256
    """Longest completion, in tokens."""
    chat: bool = False
    """Put a prompt that is plain text into the model's chat template, as the user's turn. Lists of messages
    always go through the template."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a completion; they and what follows are not scored."""


class ExactMatchTask(GenerationTask):
    """Share of the completions that equal the reference. Problems: `{"prompt", "reference"}`."""

    type: Literal["exact_match"]
    """Kind of the task."""
    extract: str | None = None
    """Regular expression for the answer within a text: its first group (or all it matches) at its last
    match, in completions, and in references that it matches. Unset: the whole text."""
    ignore_case: bool = False
    """Upper and lower case count as equal."""
    ignore_punctuation: bool = False
    """Leave out everything but letters, digits and spaces."""

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of its metrics."""
        return ("exact_match",)


class TextOverlapTask(GenerationTask):
    """BLEU and chrF of the completions, by sacrebleu. Problems: `{"prompt", "reference"}`."""

    type: Literal["text_overlap"]
    """Kind of the task."""
    metrics: list[Literal["bleu", "chrf"]] = Field(default=["bleu", "chrf"], min_length=1)
    """`bleu`: of all completions together. `chrf`: mean over the completions."""
    tokenize: Literal["13a", "char", "intl", "none"] = "13a"
    """How sacrebleu cuts words for BLEU; `char` for languages without spaces."""

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of its metrics."""
        return tuple(dict.fromkeys(self.metrics))


class PassAtKTask(GenerationTask):
    """Share of the problems that one of k programs solves. Problems: `{"prompt", "tests", "entry_point"}`;
    the programs run in a sandbox (docs, *Downstream evaluation*)."""

    type: Literal["pass_at_k"]
    """Kind of the task."""
    k: list[PositiveInt] = Field(default=[1], min_length=1)
    """The k of pass@k; `n_samples` must not be smaller."""
    program: Literal["continuation", "fenced"] = "continuation"
    """`continuation`: the program is the prompt and its completion. `fenced`: it is the first fenced block of
    code in the completion, or the whole completion where there is none."""

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of its metrics."""
        return tuple(f"pass_at_{k}" for k in sorted(set(self.k)))


class LMEvalTask(Section):
    """A task of lm-evaluation-harness, which must be installed (`pip install "ebft[lm-eval]"`)."""

    type: Literal["lm_eval"]
    """Kind of the task."""
    name: str = Field(pattern=TASK_NAME)
    """Name of the task here."""
    task: str = Field(min_length=1)
    """The task's name in the harness, for example `hellaswag`."""
    metrics: list[str] = Field(default=["acc"], min_length=1)
    """Metrics of the harness that are means over problems and of which more is better. One behind a filter is
    named as the harness does: `exact_match,strict-match`."""
    num_fewshot: NonNegativeInt | None = None
    """Solved problems put in front of each; unset: as the task says."""
    limit: PositiveInt | None = None
    """Use only the first problems; unset: all."""
    include_path: str | None = None
    """Folder with definitions of further tasks."""

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of its metrics; MLflow's have no commas."""
        return tuple(name.replace(",", ".") for name in dict.fromkeys(self.metrics))


class SandboxConfig(Section):
    """Bounds of a generated program. It has no network, no home, one process, and a private `/tmp`."""

    timeout_seconds: float = Field(default=10.0, gt=0.0)
    """Seconds a program may take, tests included; its processor time has the same bound."""
    memory_mb: PositiveInt = 512
    """Memory of a program."""
    disk_mb: PositiveInt = 16
    """Room in `/tmp`, and length of its longest file."""


TaskConfig = Annotated[
    ExactMatchTask | TextOverlapTask | PassAtKTask | LMEvalTask, Field(discriminator="type")
]
