"""Planning of a comparison or a sweep: one run per arm, and the run that measures all of their models.

Arms are ordinary runs of the same workspace, so they share base model and rows by their keys, and a training
that `ebft run` has done before is not done again. The group has a run folder of its own; its last stage,
`compare`, reads the models of the arms that finished.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ebft_core.arms import BASE, Arm
from ebft_core.comparison import Kind
from ebft_core.config import RunConfig
from ebft_core.errors import UserError
from ebft_core.manifests import digest_json, write_json_atomic
from ebft_core.runs import RunPlan, StagePlan, plan_runs, write_run_folder

GROUP_FILE = "arms.json"
STAGE = "compare"
_NAME_LENGTH = 64


@dataclass(frozen=True)
class ArmRun:
    """The planned training of one arm."""

    arm: Arm
    plan: RunPlan

    number: int

    @property
    def input(self) -> str:
        """What the stage `compare` calls the arm's model; an arm's own name need not be one of a file."""
        return f"arm-{self.number}"

    @property
    def model(self) -> StagePlan:
        """The stage whose output is the arm's model."""
        return self.plan.stage(self.arm.stage)


@dataclass(frozen=True)
class ArmGroup:
    """Several arms of one run file.

    Attributes:
        kind: what started it.
        metric: what the best arm is best in.
        budget: how long every arm trains, in words.
        config: the run file; its evaluation measures all arms.
        plan: the group's own run as far as the base model and the rows.
        evaluation_key: key of the run file's own evaluation: the code, the rows, and how they are measured.
        runs: trained arms by name; the base has no training.
    """

    kind: Kind
    metric: str
    budget: str
    config: RunConfig
    plan: RunPlan
    evaluation_key: str
    runs: Mapping[str, ArmRun]


def name_of_run(config: RunConfig, arm: Arm) -> str:
    """The name of an arm's run: the run file's with the arm's, in the letters that names may have."""
    return f"{config.name}.{re.sub(r'[^A-Za-z0-9._-]+', '-', arm.name)}"[:_NAME_LENGTH]


def plan_group(
    kind: Kind, config: RunConfig, arms: Sequence[tuple[Arm, RunConfig]], *, metric: str, budget: str
) -> ArmGroup:
    """Plan every arm, and the folder of the group.

    Args:
        config: the run file without any arm's changes.
        arms: the trained arms, each with its resolved configuration.

    Raises:
        UserError: no arm is trained, two arms are the same training, or what `plan_run` raises.
    """
    if not arms:
        raise UserError("nothing to compare with the base", where="--arms", expected="a further arm")
    plan, *plans = plan_runs([config, *(arm_config for _, arm_config in arms)])
    runs = {
        arm.name: ArmRun(arm, planned, number)
        for number, ((arm, _), planned) in enumerate(zip(arms, plans, strict=True), 1)
    }
    _refuse_equal(runs)
    models = {name: run.model.key for name, run in runs.items()}
    key = digest_json(
        {"kind": kind, "metric": metric, "budget": budget, "run": plan.run_key, "models": models}
    )
    folder = plan.workspace / "runs" / f"{config.name}.{kind}-{key[:12]}"
    shared = (plan.stage("prepare_base"), plan.stage("tokenize"))
    own = replace(plan, name=f"{config.name}.{kind}", run_key=key, run_dir=folder, stages=shared)
    return ArmGroup(kind, metric, budget, config, own, plan.stage("evaluate").key, runs)


def comparison_plan(group: ArmGroup, finished: Collection[str]) -> RunPlan:
    """The group's plan with its last stage, which reads the models of the arms in `finished`."""
    models = [replace(run.model, name=run.input) for name, run in group.runs.items() if name in finished]
    key = digest_json(
        {
            "stage": STAGE,
            "evaluate": group.evaluation_key,
            "kind": group.kind,
            "metric": group.metric,
            "budget": group.budget,
            "models": {model.name: model.key for model in models},
        }
    )
    place = (group.plan.workspace / part / STAGE / key for part in ("stages", "work"))
    return replace(group.plan, stages=(*group.plan.stages, *models, StagePlan(STAGE, key, *place)))


def write_group(group: ArmGroup, plan: RunPlan) -> None:
    """Create or renew the group's run folder: configuration, plan and `arms.json`."""
    write_run_folder(plan, group.config)
    document = {
        "kind": group.kind,
        "metric": group.metric,
        "budget": group.budget,
        "arms": {
            BASE: asdict(Arm(BASE, stage="prepare_base")),
            **{
                name: {**asdict(run.arm), "input": run.input, "run_dir": str(run.plan.run_dir)}
                for name, run in group.runs.items()
            },
        },
    }
    write_json_atomic(plan.run_dir / GROUP_FILE, document)


def read_group(run_dir: Path) -> dict[str, Any]:
    """`arms.json` of a group's folder: kind, metric, budget, and the arms with their run folders."""
    document: dict[str, Any] = json.loads((run_dir / GROUP_FILE).read_text(encoding="utf-8"))
    return document


def arm_models(inputs: Mapping[str, Path], document: Mapping[str, Any]) -> dict[str, Path]:
    """Arm → folder of its model: the arms of `arms.json` that are among the inputs of the stage `compare`."""
    return {
        name: inputs[arm["input"]] / "model"
        for name, arm in document["arms"].items()
        if arm.get("input") in inputs
    }


def _refuse_equal(runs: Mapping[str, ArmRun]) -> None:
    seen: dict[str, str] = {}
    for name, run in runs.items():
        twin = seen.setdefault(run.model.key, name)
        if twin != name:
            raise UserError(
                "two arms are the same training",
                where="--arms, --arm, --grid",
                value=[twin, name],
                expected="arms that differ in a key that training reads",
            )
