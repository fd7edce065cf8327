"""Planning: what changes a key and what does not, what is written, who may start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from evaluation.builders import save_model, tiny_model

from ebft_core import preflight
from ebft_core.config import load_config, parse_config
from ebft_core.errors import UserError
from ebft_core.lease import hold_lease
from ebft_core.preflight import check_disk, check_workspace, estimate_bytes
from ebft_core.runs import STAGES, plan_run, read_plan, write_run_folder
from orchestration.builders import micro_config, micro_document, planned_run


def keys(document: Mapping[str, Any]) -> dict[str, str]:
    return {stage.name: stage.key for stage in plan_run(parse_config(document)).stages}


@pytest.mark.parametrize(
    ("section", "change", "first"),
    [
        ("model", {"from_scratch": {"max_steps": 7}}, "prepare_base"),
        ("data", {"sequence_length": 48}, "tokenize"),
        ("ebft", {"ce_coef": 0.1}, "train"),
        ("trainer", {"learning_rate": 2e-3}, "train"),
        ("lora", {"r": 2}, "train"),
        ("evaluate", {"max_rows": 3}, "evaluate"),
        ("publish", {"alias": "other"}, "publish"),
        ("trainer", {"save_every": 1}, None),
        ("trainer", {"keep_checkpoints": 5}, None),
        ("storage", {"reserve_gb": 0.01}, None),
    ],
)
def test_a_change_gives_new_keys_from_its_first_reader_on(
    tmp_path: Path, section: str, change: dict[str, Any], first: str | None
) -> None:
    document = micro_document(tmp_path)
    before = keys(document)
    part = document.setdefault(section, {})
    for name, value in change.items():
        part[name] = {**part[name], **value} if isinstance(value, dict) else value
    after = keys(document)
    changed = [name for name in STAGES if before[name] != after[name]]
    assert changed == ([] if first is None else list(STAGES[STAGES.index(first) :]))


def test_a_warm_start_is_a_stage_of_its_own(tmp_path: Path) -> None:
    document = micro_document(tmp_path)
    without = plan_run(parse_config(document))
    document["sft"] = {"max_steps": 3}
    plan = plan_run(parse_config(document))
    assert [s.name for s in plan.stages] == ["prepare_base", "tokenize", "sft", *STAGES[2:]]
    assert (without.start.name, plan.start.name) == ("prepare_base", "sft")
    assert plan.stage("tokenize").key == without.stage("tokenize").key
    assert plan.stage("train").key != without.stage("train").key

    def key_of_sft(section: str, **change: Any) -> str:
        changed = {**document, section: {**document[section], **change}}
        return plan_run(parse_config(changed)).stage("sft").key

    unchanged = plan.stage("sft").key
    assert key_of_sft("ebft", ce_coef=0.1) == unchanged  # arms of a sweep share the warm start
    assert key_of_sft("trainer", learning_rate=2e-3) == unchanged
    assert key_of_sft("sft", save_every=7) == unchanged
    assert key_of_sft("sft", max_steps=4) != unchanged
    assert key_of_sft("lora", r=2) != unchanged


def test_a_further_model_counts_by_its_content(tmp_path: Path) -> None:
    document = micro_document(tmp_path)
    before = keys(document)
    for name, seed in (("here", 0), ("elsewhere", 0), ("other", 1)):
        save_model(tiny_model(seed=seed), tmp_path / name)
    found = {}
    for name in ("here", "elsewhere", "other"):
        document["evaluate"]["against"] = {"champion": str(tmp_path / name)}
        found[name] = keys(document)
    assert found["here"] == found["elsewhere"]
    assert found["here"]["evaluate"] not in (before["evaluate"], found["other"]["evaluate"])
    assert found["here"]["merge"] == before["merge"]


def test_moving_the_workspace_changes_nothing_but_the_folders(tmp_path: Path) -> None:
    document = micro_document(tmp_path)
    here = plan_run(parse_config(document))
    there = plan_run(parse_config({**document, "workspace": str(tmp_path / "elsewhere")}))
    assert here.run_key == there.run_key
    assert here.run_dir != there.run_dir


def test_a_source_changed_with_the_same_size_and_time_is_noticed(tmp_path: Path) -> None:
    config = micro_config(tmp_path)
    before = plan_run(config)
    victim = tmp_path / "text" / "d00.txt"
    status = victim.stat()
    content = bytearray(victim.read_bytes())
    content[5] = ord("!")
    victim.write_bytes(content)
    os.utime(victim, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = plan_run(config)
    assert before.data_digest != after.data_digest
    assert before.stage("tokenize").key != after.stage("tokenize").key


def test_the_written_plan_and_configuration_read_back(tmp_path: Path) -> None:
    config = micro_config(tmp_path)
    plan = plan_run(config)
    write_run_folder(plan, config)
    assert read_plan(plan.run_dir) == plan
    assert load_config(plan.run_dir / "config.yaml") == config


def test_no_secret_reaches_the_run_folder(tmp_path: Path) -> None:
    tracking = {"mlflow_uri": "https://ann:hunter2@mlflow.example", "tags": {"hf_token": "hunter2"}}
    config = parse_config({**micro_document(tmp_path), "tracking": tracking})
    plan = plan_run(config)
    write_run_folder(plan, config)
    for path in plan.run_dir.rglob("*"):
        assert not path.is_file() or "hunter2" not in path.read_text(encoding="utf-8")


def test_states_of_a_stage(tmp_path: Path) -> None:
    stage = planned_run(tmp_path).stage("train")
    assert stage.state == "missing"
    stage.work.mkdir(parents=True)
    assert stage.state == "missing"
    (stage.work / "checkpoint").touch()
    assert stage.state == "partial"


def test_planning_imports_neither_torch_nor_servers() -> None:
    code = (
        "import sys, ebft_core.runs, ebft_core.stage_runner, ebft_core.preflight, tasks.report;"
        "heavy = {'torch', 'transformers', 'datasets', 'mlflow', 'prefect'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_folder_without_a_plan_is_an_error_of_the_users(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        read_plan(tmp_path)


def test_the_second_start_is_told_who_holds_the_run(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from ebft_core.lease import hold_lease\n"
        f"with hold_lease(pathlib.Path({str(tmp_path)!r})):\n print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(UserError, match=f"process {holder.pid} of"), hold_lease(tmp_path):
        pass
    holder.kill()  # a killed holder frees the run
    holder.communicate()
    with hold_lease(tmp_path):
        assert yaml.safe_load((tmp_path / "lease.json").read_text())["pid"] == os.getpid()
    assert not (tmp_path / "lease.json").exists()


def test_a_workspace_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    with pytest.raises(UserError, match="workspace is not writable"):
        check_workspace(blocker / "workspace")


def test_a_disk_too_small_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = micro_config(tmp_path)
    plan = plan_run(config)
    plan.workspace.mkdir()
    need = estimate_bytes(config, plan)
    reserve = int(config.storage.reserve_gb * 1e9)
    usage = type(preflight.shutil.disk_usage(tmp_path))
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage(10**12, 0, need + reserve - 1))
    with pytest.raises(UserError, match="disk is too small"):
        check_disk(config, plan)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage(10**12, 0, need + reserve))
    check_disk(config, plan)


def test_the_disk_estimate_counts_every_copy_of_a_full_model(tmp_path: Path) -> None:
    """In float32: base 4 bytes a weight, (2 + 1) checkpoints of 12, tuned and merged model 4 each."""
    document = micro_document(tmp_path)
    made = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 10, "tokenizer": "byte"}
    document["model"]["from_scratch"].update(made)
    document["lora"] = None
    config = parse_config(document)
    parameters = 10 * (4 * 256**2 + 3 * 256 * 1024) + 2 * 512 * 256
    expected = 4 * parameters + 3 * 12 * parameters + 4 * parameters + 4 * parameters
    assert estimate_bytes(config, plan_run(config)) == expected
