"""What the flows of comparisons and sweeps are asked for, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ebft_core.errors import UserError
from orchestration.builders import micro_config, micro_document, micro_file
from tasks.start_group import GroupRequest, check_parallel, request_comparison, request_sweep
from tasks.start_run import read_config


def comparison_of(config: Any, *overrides: str, **asked: Any) -> GroupRequest:
    settings = {"arms": None, "own_arms": None, "max_steps": None, "max_seconds": None, **asked}
    return request_comparison(config, list(overrides), **settings)


def test_a_file_and_its_content_ask_for_the_same(tmp_path: Path) -> None:
    file = micro_file(tmp_path)
    by_path = comparison_of(str(file), own_arms={"n2": ["ebft.n_samples_per_prompt=2"]})
    by_content = comparison_of(micro_document(tmp_path), own_arms={"n2": ["ebft.n_samples_per_prompt=2"]})
    assert by_path.group == by_content.group
    assert list(by_path.group.runs) == ["sft", "ebft", "ebft+ce", "n2"]
    assert by_path.parameters["n2"][0] == str(file)  # a path: what it holds is not shown in Prefect
    for name in by_path.parameters:
        configs = [read_config(*request.parameters[name]) for request in (by_path, by_content)]
        assert configs[0] == configs[1]
    assert read_config(*by_path.parameters["ebft+ce"]).name == "micro.ebft-ce"


def test_overrides_hold_for_every_arm_and_an_arms_own_changes_win(tmp_path: Path) -> None:
    file = str(micro_file(tmp_path))
    request = comparison_of(
        file, "ebft.stride=4", "ebft.ce_coef=0.2", own_arms={"x": ["ebft.ce_coef=0.7"]}, max_steps=9
    )
    arms = {name: read_config(*request.parameters[name]) for name in request.parameters}
    assert {config.ebft.stride for config in arms.values()} == {4}
    assert {name: arms[name].ebft.ce_coef for name in ("ebft", "ebft+ce", "x")} == {
        "ebft": 0.0,
        "ebft+ce": 0.2,
        "x": 0.7,
    }
    assert {arms[name].trainer.max_steps for name in ("ebft", "ebft+ce", "x")} == {9}
    assert request.group.budget == "9 optimiser steps"


def test_the_same_request_has_the_same_folder_and_another_has_another(tmp_path: Path) -> None:
    file = str(micro_file(tmp_path))
    folders = [
        request.group.plan.run_dir
        for request in (
            comparison_of(file),
            comparison_of(file),
            comparison_of(file, max_steps=3),
            comparison_of(file, arms=["sft"]),
            request_sweep(file, [], grid={"ebft.ce_coef": [0.0, 0.5]}),
        )
    ]
    assert folders[0] == folders[1]
    assert len(set(folders)) == 4


def test_a_grid_comes_from_the_command_or_from_the_file(tmp_path: Path) -> None:
    document = {**micro_document(tmp_path), "sweep": {"grid": {"trainer.max_steps": [2, 3]}}}
    from_file = request_sweep(document, [], grid=None).group
    assert list(from_file.runs) == ["max_steps=2", "max_steps=3"]
    assert from_file.budget == "the steps of the grid"
    given = request_sweep(document, [], grid={"ebft.ce_coef": [0.0]}).group
    assert (list(given.runs), given.budget) == (["ce_coef=0.0"], "4 optimiser steps")


def test_a_mistake_in_one_arm_is_found_before_any_is_trained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ebft\.ce_coef"):
        request_sweep(micro_document(tmp_path), [], grid={"ebft.ce_coef": [0.0, -1.0]})
    assert not (tmp_path / "workspace" / "runs").exists()


def test_trainings_with_a_server_of_their_own_do_not_run_side_by_side(tmp_path: Path) -> None:
    config = micro_config(tmp_path)
    assert check_parallel(config, 3) == 3
    structured = config.model_copy(update={"ebft": config.ebft.model_copy(update={"mode": "structured"})})
    assert check_parallel(structured, 1) == 1
    with pytest.raises(UserError, match="one after the other"):
        check_parallel(structured, 2)
    with pytest.raises(UserError, match="no training at a time"):
        check_parallel(config, 0)
