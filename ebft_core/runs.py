"""Planning of a run: what it reads, which stages it has, which of them are done already.

Everything is known before anything runs. A stage's key is a digest of the code, of the parts of the
configuration the stage reads, of the keys of the stages it reads, and of the outside files it reads.
Two runs that agree on these share the stage's output; a change anywhere gives a new key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from ebft_core.base_model import digest_model_folder
from ebft_core.config import RunConfig, SourceConfig
from ebft_core.config.redaction import redact
from ebft_core.data.exclusion import digest_exclusion
from ebft_core.data.remote import remote_of
from ebft_core.data.sources import digest_sources
from ebft_core.data.transforms.custom import fingerprint_transform
from ebft_core.errors import UserError
from ebft_core.evaluation.outside import digest_outside
from ebft_core.lease import workspace_lock
from ebft_core.manifests import digest_files, digest_json, verify_folder, write_json_atomic, write_text_atomic
from ebft_core.own_rewards import fingerprint_rewards

JOURNAL = "events.jsonl"
"""A stage's journal inside its committed output, for runs that share the stage."""

StageState = Literal["done", "partial", "missing"]

_READS: Mapping[str, tuple[str, ...]] = {
    "prepare_base": ("model",),
    "tokenize": (
        "model.chat_template",
        "model.trust_remote_code",
        "data",
        "ebft.mode",
        "ebft.context_length",
        "ebft.generate_max_len",
        "ebft.min_completion_prefix",
    ),
    "sft": (
        "sft",
        "lora",
        "ebft.document_masking",
        "trainer.adam_beta1",
        "trainer.adam_beta2",
        "trainer.max_grad_norm",
        "trainer.gradient_checkpointing",
        "trainer.precision",
        "trainer.device",
    ),
    "train": ("ebft", "trainer", "lora", "rollout", "rewards"),
    "merge": ("lora",),
    "evaluate": ("evaluate", "ebft", "trainer"),
    "publish": ("publish", "name", "tracking"),
}
"""Stage -> the parts of the configuration it reads, in the order in which the stages run."""

_NO_EFFECT_ON_RESULT: Mapping[str, frozenset[str]] = {
    "data": frozenset({"exclude_hashes"}),  # its content has
    "sft": frozenset({"save_every"}),
    "evaluate": frozenset({"against", "heldout", "feature_model"}),  # their contents have
    "trainer": frozenset(
        {"save_every", "keep_checkpoints", "tokens_per_forward", "share_prefixes", "sample_every"}
    ),
}
_NOT_OF_THE_RUN = frozenset({"workspace", "storage", "retrain", "compare", "sweep"})
"""Sections that say where a run is, or what other runs stand beside it."""

WARM_START = "sft"
"""The stage of runs with a section of this name."""
STAGES = tuple(name for name in _READS if name != WARM_START)
"""The stages of every run."""


@dataclass(frozen=True)
class StagePlan:
    """One stage of a run: its key, the folder of its output and the folder of its unfinished work."""

    name: str
    key: str
    output: Path
    work: Path

    @property
    def state(self) -> StageState:
        """`done` (by names and sizes; whoever skips the stage hashes it), `partial` or `missing`."""
        if verify_folder(self.output, deep=False) is not None:
            return "done"
        return "partial" if self.work.is_dir() and any(self.work.iterdir()) else "missing"


@dataclass(frozen=True)
class RunPlan:
    """A run before it starts. Digests are hex sha256; `base_digest` is None until a hub model is fetched."""

    name: str
    run_key: str
    run_dir: Path
    workspace: Path
    working_dir: Path
    config_digest: str
    code_digest: str
    data_digest: str
    base_digest: str | None
    stages: tuple[StagePlan, ...]

    def stage(self, name: str) -> StagePlan:
        """The plan of one stage. Raises UserError for an unknown name."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise UserError(
            "no such stage", where="stage", value=name, expected=", ".join(s.name for s in self.stages)
        )

    @property
    def start(self) -> StagePlan:
        """The stage whose model EBFT starts from: the warm start where there is one, else `prepare_base`."""
        warm = [stage for stage in self.stages if stage.name == WARM_START]
        return warm[0] if warm else self.stage("prepare_base")

    def before(self, name: str) -> tuple[StagePlan, ...]:
        """The stages that come before `name`."""
        return self.stages[: self.stages.index(self.stage(name))]


def plan_run(config: RunConfig) -> RunPlan:
    """Digest everything the run reads and lay out its folders; writes nothing but sources from S3.

    Raises:
        UserError: a source matches no file or cannot be reached, or the base model's folder is not one.
    """
    (plan,) = plan_runs([config])
    return plan


def plan_runs(configs: Sequence[RunConfig]) -> list[RunPlan]:
    """Plan several runs as `plan_run` does; data and base model that they share are digested once."""
    digests: dict[tuple[str, str], tuple[str, str | None]] = {}
    plans = []
    for config in configs:
        read = (config.data.model_dump_json(), config.model.model_dump_json())
        if read not in digests:
            digests[read] = digest_sources(config.data.sources, remote_of(config)), _base_digest(config)
        plans.append(_plan(config, *digests[read]))
    return plans


def _plan(config: RunConfig, data: str, base: str | None) -> RunPlan:
    working_dir = Path.cwd()
    workspace = workspace_folder(config)
    document = redact(config.model_dump(mode="json"))
    code = code_digest()
    stages = tuple(
        StagePlan(name, key, workspace / "stages" / name / key, workspace / "work" / name / key)
        for name, key in _stage_keys(document, _external(config, data, base), code).items()
    )
    config_digest = digest_json({k: v for k, v in document.items() if k not in _NOT_OF_THE_RUN})
    run_key = digest_json({"config": config_digest, "stages": [stage.key for stage in stages]})
    return RunPlan(
        name=config.name,
        run_key=run_key,
        run_dir=workspace / "runs" / f"{config.name}-{run_key[:12]}",
        workspace=workspace,
        working_dir=working_dir,
        config_digest=config_digest,
        code_digest=code,
        data_digest=data,
        base_digest=base if config.model.from_scratch is None else None,
        stages=stages,
    )


def workspace_folder(config: RunConfig) -> Path:
    """The workspace's folder on this machine, absolute."""
    return (Path.cwd() / Path(config.local_workspace).expanduser()).resolve()


def digest_inputs(config: RunConfig) -> str:
    """Digest of all that shapes a judged model but our own code: data, base model, configuration.

    It is the key that stage `evaluate` would have if the code never changed. Raises UserError as `plan_run`.
    """
    document = redact(config.model_dump(mode="json"))
    data = digest_sources(config.data.sources, remote_of(config))
    return _stage_keys(document, _external(config, data, _base_digest(config)), code=None)["evaluate"]


def _external(config: RunConfig, data: str, base: str | None) -> dict[str, Any]:
    """Stage → what it reads from outside the run, as digests."""
    outside = digest_outside(config)
    shows_heldout = config.trainer.eval_every is not None  # in the journal, which is part of the output
    return {
        "prepare_base": {"base": base, "chat_template": _file_digest(config)},
        "tokenize": {
            "data": data,
            "excluded": digest_exclusion(config.data),
            "transform": fingerprint_transform(config.data.transform),
            "extra": bool(config.rewards),  # columns kept for rewards, whatever their weights are
        },
        "train": {
            "rewards": fingerprint_rewards(config.rewards),
            "heldout": outside.get("evaluate.heldout") if shows_heldout else None,
        },
        "evaluate": outside,
    }


def _stage_keys(document: Mapping[str, Any], external: Mapping[str, Any], code: str | None) -> dict[str, str]:
    """Stage → key, which holds the keys of the stages before it."""
    keys: dict[str, str] = {}
    for name, parts in _READS.items():
        if name == WARM_START and document[WARM_START] is None:
            continue
        keys[name] = digest_json(
            {
                "stage": name,
                "code": code,
                "config": {part: _part(document, part) for part in parts},
                "inputs": list(keys.values()),
                "external": external.get(name),
            }
        )
    return keys


def write_run_folder(plan: RunPlan, config: RunConfig) -> None:
    """Create the run's folder: `config.yaml` (resolved, without secrets) and `plan.json`."""
    for folder in ("events", "logs", "stages"):
        (plan.run_dir / folder).mkdir(parents=True, exist_ok=True)
    document = redact(config.model_dump(mode="json"))
    write_text_atomic(
        plan.run_dir / "config.yaml", yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    )
    with workspace_lock(plan.workspace):
        write_json_atomic(plan.run_dir / "plan.json", _to_json(plan))


def read_plan(run_dir: Path) -> RunPlan:
    """The plan of an existing run. Raises UserError if there is none."""
    path = run_dir / "plan.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            "not a run folder",
            where="--run-dir",
            value=str(run_dir),
            expected="a folder with a plan.json",
            hint="`ebft run CONFIG` creates one",
        ) from error
    stages = tuple(StagePlan(s["name"], s["key"], Path(s["output"]), Path(s["work"])) for s in data["stages"])
    paths = {name: Path(data[name]) for name in ("run_dir", "workspace", "working_dir")}
    return RunPlan(**{**data, **paths, "stages": stages})


@cache
def code_digest() -> str:
    """Digest of every Python file of `ebft_core`."""
    root = Path(__file__).parent
    return digest_files(root.rglob("*.py"), root=root)


def _base_digest(config: RunConfig) -> str | None:
    """What is known about the base model before it is made or fetched."""
    model = config.model
    if model.from_scratch is not None:
        return digest_sources([SourceConfig(path=pattern) for pattern in model.from_scratch.sources])
    if model.name_or_path is not None and Path(model.name_or_path).expanduser().is_dir():
        return digest_model_folder(Path(model.name_or_path).expanduser())
    return None  # a hub id: the stage resolves the revision and records its digest


def _file_digest(config: RunConfig) -> str | None:
    template = config.model.chat_template
    if template is None:
        return None
    path = Path(template).expanduser()
    if not path.is_file():
        raise UserError(
            "file not found", where="model.chat_template", value=template, expected="a Jinja template"
        )
    return digest_files([path])


def _part(document: Mapping[str, Any], dotted: str) -> Any:
    value: Any = document
    for key in dotted.split("."):
        value = value[key]
    skipped = _NO_EFFECT_ON_RESULT.get(dotted)
    return {k: v for k, v in value.items() if k not in skipped} if skipped else value


def _to_json(plan: RunPlan) -> dict[str, Any]:
    return {
        "name": plan.name,
        "run_key": plan.run_key,
        "run_dir": str(plan.run_dir),
        "workspace": str(plan.workspace),
        "working_dir": str(plan.working_dir),
        "config_digest": plan.config_digest,
        "code_digest": plan.code_digest,
        "data_digest": plan.data_digest,
        "base_digest": plan.base_digest,
        "stages": [
            {"name": s.name, "key": s.key, "output": str(s.output), "work": str(s.work)} for s in plan.stages
        ],
    }
