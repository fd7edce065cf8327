"""Arms and grids: what they change, what they must not change, and that the budget is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from orchestration.builders import micro_document

from ebft_core.arm_group import arm_models, comparison_plan, plan_group, read_group, write_group
from ebft_core.arms import BASE, KINDS, Arm, Budget, check_overrides, compare_arms, parse_arm
from ebft_core.config import RunConfig, load_config, parse_config
from ebft_core.config.loading import with_overrides
from ebft_core.errors import UserError
from ebft_core.sweep import MAX_ARMS, parse_grid, sweep_arms


def resolved(document: dict[str, Any], arm: Arm) -> RunConfig:
    """The arm's configuration, read as `--set` is read."""
    return parse_config(with_overrides(document, arm.overrides))


def arms_of(document: dict[str, Any], names: tuple[str, ...], **custom: list[str]) -> dict[str, Arm]:
    config = parse_config(document)
    budget = Budget.of(config, None, None)
    return {arm.name: arm for arm in compare_arms(config, names, custom, budget)}


def test_known_arms_differ_in_what_their_names_say(tmp_path: Path) -> None:
    document = micro_document(tmp_path)
    arms = arms_of(document, KINDS)
    assert list(arms) == list(KINDS)
    assert arms[BASE].overrides == ()
    ebft, both = resolved(document, arms["ebft"]), resolved(document, arms["ebft+ce"])
    assert (ebft.sft, ebft.ebft.ce_coef, ebft.trainer.max_steps) == (None, 0.0, 4)
    assert both.ebft.ce_coef == 0.5  # the run's own
    document["ebft"]["ce_coef"] = 0.0
    assert resolved(document, arms_of(document, ("ebft+ce",))["ebft+ce"]).ebft.ce_coef == 0.1


def test_sft_reads_as_many_rows_in_a_step_as_the_trainer(tmp_path: Path) -> None:
    document = micro_document(tmp_path, gradient_accumulation_steps=3)
    sft = resolved(document, arms_of(document, ("sft",))["sft"]).sft
    assert sft is not None
    assert (sft.micro_batch_size, sft.batch_size, sft.max_steps) == (2, 6, 4)


def test_sft_has_a_rate_of_its_own_or_the_trainers(tmp_path: Path) -> None:
    document = micro_document(tmp_path)
    lent = resolved(document, arms_of(document, ("sft",))["sft"]).sft
    assert lent is not None
    assert (lent.learning_rate, lent.save_every) == (1e-3, 2)
    document["sft"] = {"learning_rate": 5e-4}
    own = resolved(document, arms_of(document, ("sft",))["sft"]).sft
    assert own is not None
    assert (own.learning_rate, own.max_steps) == (5e-4, 4)


@pytest.mark.parametrize(("steps", "parts"), [(4, (2, 2)), (7, (3, 4)), (2, (1, 1))])
def test_a_warm_start_and_what_follows_add_up_to_the_budget(
    tmp_path: Path, steps: int, parts: tuple[int, int]
) -> None:
    document = micro_document(tmp_path, max_steps=steps)
    warm = resolved(document, arms_of(document, ("sft+ebft",))["sft+ebft"])
    assert warm.sft is not None
    assert (warm.sft.max_steps, warm.trainer.max_steps) == parts
    own = arms_of(document, (), warm=["sft.learning_rate=1e-4"])["warm"]
    config = resolved(document, own)
    assert config.sft is not None
    assert (config.sft.max_steps, config.trainer.max_steps) == parts


def test_one_step_cannot_be_divided(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be divided"):
        arms_of(micro_document(tmp_path, max_steps=1), ("sft+ebft",))


@pytest.mark.parametrize(
    ("trainer", "asked", "text"),
    [
        ({"max_steps": 4}, (None, None), "4 optimiser steps"),
        ({"max_steps": 4}, (1, None), "1 optimiser step"),
        ({"max_steps": 4}, (None, 90.0), "90 seconds of training"),
        ({"max_steps": None, "max_seconds": 30.0}, (None, None), "30 seconds of training"),
        ({"max_steps": None, "num_train_epochs": 2.0}, (None, None), "2 passes over the rows"),
        ({"max_steps": None}, (None, None), "1 pass over the rows"),
    ],
)
def test_the_budget_is_the_one_asked_for_or_the_trainers(
    tmp_path: Path, trainer: dict[str, Any], asked: tuple[int | None, float | None], text: str
) -> None:
    document = micro_document(tmp_path, **trainer)
    config = parse_config(document)
    budget = Budget.of(config, *asked)
    assert budget.text == text
    for arm in compare_arms(config, ("sft", "ebft"), {}, budget)[1:]:
        arm_config = resolved(document, arm)
        section = arm_config.sft if arm.name == "sft" else arm_config.trainer
        assert section is not None
        found = (section.max_steps, section.max_seconds, section.num_train_epochs)
        assert found == (budget.max_steps, budget.max_seconds, budget.num_train_epochs)


def test_two_budgets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="two budgets"):
        Budget.of(parse_config(micro_document(tmp_path)), 10, 60.0)


def test_an_arm_is_read_with_lists_in_its_values() -> None:
    name, overrides = parse_arm("deep:ebft.feature_layers=[0.5,1.0],ebft.ce_coef=0.03")
    assert (name, overrides) == ("deep", ("ebft.feature_layers=[0.5,1.0]", "ebft.ce_coef=0.03"))


@pytest.mark.parametrize("text", ["deep", "deep:", "deep:ce_coef", ":a=1", "a/b:ebft.ce_coef=1"])
def test_what_is_no_arm_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="not of the form"):
        parse_arm(text)


@pytest.mark.parametrize(
    "key", ["data.heldout_fraction", "model.name_or_path", "evaluate.seed", "ebft.mode", "ebft", "workspace"]
)
def test_nobody_changes_what_is_measured(tmp_path: Path, key: str) -> None:
    with pytest.raises(UserError, match="same rows"):
        check_overrides([f"{key}=1"], where="--arm a")
    with pytest.raises(UserError, match="same rows"):
        sweep_arms({key: [1, 2]}, where="--grid")


def test_an_arm_cannot_change_the_budget(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="share one budget"):
        arms_of(micro_document(tmp_path), (), long=["trainer.max_steps=9"])


@pytest.mark.parametrize("names", [("sft", "sft"), ("best",)])
def test_repeated_and_unknown_arms_are_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(UserError):
        arms_of(micro_document(tmp_path), names)


def test_a_grid_is_every_combination_with_short_names() -> None:
    grid = parse_grid(["ebft.ce_coef=0,0.03", "lora.target_modules=all-linear,[q_proj, v_proj]"])
    assert grid == {
        "ebft.ce_coef": [0, 0.03],
        "lora.target_modules": ["all-linear", ["q_proj", "v_proj"]],
    }
    base, *arms = sweep_arms(grid, where="--grid")
    assert base.name == BASE
    assert [arm.name for arm in arms][:2] == [
        "ce_coef=0 target_modules=all-linear",
        'ce_coef=0 target_modules=["q_proj", "v_proj"]',
    ]
    assert len(arms) == 4
    assert arms[3].overrides == ("ebft.ce_coef=0.03", 'lora.target_modules=["q_proj", "v_proj"]')


def test_keys_that_end_alike_keep_their_whole_names() -> None:
    _, arm = sweep_arms({"trainer.seed": [1], "sft.seed": [2]}, where="--grid")
    assert arm.name == "trainer.seed=1 sft.seed=2"


@pytest.mark.parametrize("texts", [["ebft.ce_coef"], ["ebft.ce_coef="], ["a=1", "a=2"], ["a=[1"]])
def test_what_is_no_grid_is_refused(texts: list[str]) -> None:
    with pytest.raises(UserError):
        parse_grid(texts)


@pytest.mark.parametrize("grid", [{}, {"ebft.stride": []}, {"ebft.stride": [1, 1]}, {"a": [1]}])
def test_grids_without_sense_are_refused(grid: dict[str, list[Any]]) -> None:
    with pytest.raises(UserError):
        sweep_arms(grid, where="--grid")
    too_many = {"ebft.stride": list(range(1, MAX_ARMS + 2))}
    with pytest.raises(UserError, match="too many"):
        sweep_arms(too_many, where="--grid")


def grouped(tmp_path: Path, **change: Any) -> Any:
    document = micro_document(tmp_path)
    document["evaluate"].update(change)
    config = parse_config(document)
    arms = sweep_arms({"ebft.ce_coef": [0, 1.0]}, where="--grid")[1:]
    planned = [(arm, resolved(document, arm)) for arm in arms]
    return plan_group("sweep", config, planned, metric="cfm", budget="4 optimiser steps")


def test_arms_share_base_and_rows_and_nothing_that_training_makes(tmp_path: Path) -> None:
    group = grouped(tmp_path)
    plans = [run.plan for run in group.runs.values()]
    for name in ("prepare_base", "tokenize"):
        assert {plan.stage(name).key for plan in plans} == {group.plan.stage(name).key}
    assert len({plan.stage("train").key for plan in plans}) == 2


def test_the_comparison_has_another_key_if_an_arm_is_missing_or_measured_otherwise(tmp_path: Path) -> None:
    group = grouped(tmp_path)
    everything = comparison_plan(group, group.runs)
    assert comparison_plan(grouped(tmp_path), group.runs) == everything
    assert everything.run_dir == group.plan.run_dir
    keys = {
        plan.stages[-1].key
        for plan in (
            everything,
            comparison_plan(group, ["ce_coef=0"]),
            comparison_plan(grouped(tmp_path, n_samples=3), group.runs),
        )
    }
    assert len(keys) == 3


def test_the_groups_folder_says_which_arms_there_are(tmp_path: Path) -> None:
    group = grouped(tmp_path)
    plan = comparison_plan(group, ["ce_coef=1.0"])
    write_group(group, plan)
    document = read_group(plan.run_dir)
    assert list(document["arms"]) == [BASE, "ce_coef=0", "ce_coef=1.0"]
    inputs = {stage.name: stage.output for stage in plan.stages[:-1]}
    model = group.runs["ce_coef=1.0"].plan.stage("merge").output / "model"
    assert arm_models(inputs, document) == {"ce_coef=1.0": model}


def test_two_names_for_one_training_are_refused(tmp_path: Path) -> None:
    document = micro_document(tmp_path)
    arms = [(Arm(name, ("ebft.ce_coef=1",)), parse_config(document)) for name in ("a", "b")]
    with pytest.raises(UserError, match="the same training"):
        plan_group("sweep", parse_config(document), arms, metric="cfm", budget="")


@pytest.mark.parametrize("name", ["paper-qa-code", "paper-unstructured-code", "paper-translation"])
def test_the_papers_sweep_is_shipped(name: str) -> None:
    config = load_config(Path(__file__).parents[1] / "configs" / f"{name}.yaml")
    _, *arms = sweep_arms(config.sweep.grid, where="sweep.grid")
    pairs = {tuple(float(change.split("=")[1]) for change in arm.overrides) for arm in arms}
    assert pairs == {(ce, diversity) for ce in (0.0, 0.03, 0.1) for diversity in (0.0, 0.5, 1.0)}
