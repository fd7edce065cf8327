"""`ebft gc`: the rules, what it leaves alone, and that it harms nobody who works at the same time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from orchestration.builders import micro_document

from ebft_core.config import RetentionConfig, StorageConfig, parse_config
from ebft_core.lease import hold_lease, if_free, stage_lock
from ebft_core.manifests import commit_folder, sha256_file, verify_folder
from ebft_core.runs import RunPlan, StagePlan, plan_run, write_run_folder
from ebft_core.storage import folders as folders_module
from ebft_core.storage import gc_archive
from ebft_core.storage.archive import open_archive
from ebft_core.storage.folders import Folders
from ebft_core.storage.gc_archive import ArchiveGarbage
from ebft_core.storage.gc_workspace import WorkspaceGarbage
from ebft_core.storage.retention import DAY, KnownRun, kept_runs
from ebft_core.storage.run_copies import push_run
from ebft_core.storage.store import StorageTrouble, Store, open_store

STRICT = RetentionConfig(keep_runs=1, keep_days=1.0, abandoned_days=1.0)
NOBODY: frozenset[str] = frozenset()
CLOCK = {"time": time.time, "monotonic": time.monotonic}


def planned(folder: Path, learning_rate: float, *, days_ago: float, archive: str | None = None) -> RunPlan:
    """A run whose stages are done; runs in one folder share the base model and the rows."""
    document = micro_document(folder, learning_rate=learning_rate)
    document["storage"]["archive"] = archive
    config = parse_config(document)
    plan = plan_run(config)
    write_run_folder(plan, config)
    for stage in plan.stages:
        make(stage)
    age(plan.run_dir, days_ago)
    return plan


def make(stage: StagePlan, text: str = "") -> None:
    staging = stage.output.with_name(f".staging-{stage.key}")
    staging.mkdir(parents=True)
    (staging / "file").write_text(text or stage.key)
    commit_folder(staging, stage.output, schema="x/1", meta={})


def age(path: Path, days: float) -> None:
    then = time.time() - DAY * days
    for file in [*path.rglob("*"), path]:
        os.utime(file, (then, then))


def removed(place: WorkspaceGarbage | ArchiveGarbage) -> list[str]:
    found = place.find()
    assert all(place.remove(garbage) for garbage in found)
    assert place.find() == []
    return [f"{garbage.kind} {garbage.name}" for garbage in found]


def names(plan: RunPlan, *stages: str) -> set[str]:
    return {f"stage stages/{name}/{plan.stage(name).key}" for name in stages}


def test_each_rule_keeps_what_it_says() -> None:
    def run(folder: str, days: float, name: str = "a", busy: bool = False) -> KnownRun:
        return KnownRun(folder, name, f"key-{folder}", {}, 1e9 - DAY * days, busy)

    runs = [run("new", 0), run("newer", 40), run("old", 50), run("going", 60, busy=True), run("best", 70)]
    runs += [run("other", 80, "b"), run("young", 29, "b")]
    rules = RetentionConfig(keep_runs=2, keep_days=30.0)

    def kept(rules: RetentionConfig, *registered: str) -> set[str]:
        return {run.folder for run in kept_runs(runs, rules, set(registered), 1e9)}

    assert kept(rules) == {"new", "newer", "going", "other", "young"}
    assert kept(rules, "key-best") == {"new", "newer", "going", "best", "other", "young"}
    assert kept(RetentionConfig(keep_runs=0, keep_days=0.0)) == {"going"}


def test_a_stage_goes_with_the_last_run_that_needs_it(tmp_path: Path) -> None:
    oldest = planned(tmp_path, 1e-3, days_ago=90)
    registered = planned(tmp_path, 2e-3, days_ago=60)
    newest = planned(tmp_path, 3e-3, days_ago=30)
    assert oldest.stage("tokenize").key == newest.stage("tokenize").key
    garbage = WorkspaceGarbage(newest.workspace, STRICT, {registered.run_key})
    before = sorted(newest.workspace.rglob("*"))
    assert {g.kind for g in garbage.find()} == {"run", "stage"}
    assert sorted(newest.workspace.rglob("*")) == before
    own = [stage.name for stage in oldest.stages if stage.key != newest.stage(stage.name).key]
    assert set(removed(garbage)) == {f"run runs/{oldest.run_dir.name}", *names(oldest, *own)}
    for plan in (registered, newest):
        assert all(verify_folder(stage.output) for stage in plan.stages)
        assert (plan.run_dir / "plan.json").is_file()


def test_what_is_held_or_came_into_use_is_kept(tmp_path: Path) -> None:
    old = planned(tmp_path, 1e-3, days_ago=90)
    planned(tmp_path, 2e-3, days_ago=1)
    garbage = WorkspaceGarbage(old.workspace, STRICT, NOBODY)
    train = old.stage("train")
    with hold_lease(old.run_dir):
        assert garbage.find() == []
    age(old.run_dir, 90)
    found = garbage.find()
    run, stage = found[0], next(g for g in found if train.key in g.name)
    with if_free(stage_lock(old.workspace, "train", train.key)):
        assert not garbage.remove(stage)
    assert not garbage.remove(stage)  # its run is still there
    write_run_folder(old, parse_config(micro_document(tmp_path, learning_rate=1e-3)))  # it starts again
    assert not garbage.remove(run)
    assert verify_folder(train.output) is not None
    assert old.run_dir.is_dir()


def test_abandoned_work_and_leftovers_go_and_fresh_ones_stay(tmp_path: Path) -> None:
    plan = planned(tmp_path, 1e-3, days_ago=0)
    key = plan.stage("train").key
    work = plan.stage("train").work
    leftover = plan.workspace / "stages" / "train" / f".broken-{key}-0123abcd"
    source = plan.workspace / "sources" / "ab" / "abcd.jsonl"
    for path in (work / "checkpoints" / "checkpoint-1" / "f", leftover / "f", source):
        path.parent.mkdir(parents=True)
        path.write_text("1")
    garbage = WorkspaceGarbage(plan.workspace, STRICT, NOBODY)
    assert garbage.find() == []
    for path in (work, leftover, source):
        age(path, 2)
    with hold_lease(plan.run_dir):
        assert [g.kind for g in garbage.find()] == ["work", "leftover"]  # the run may read the sources
    with if_free(stage_lock(plan.workspace, "train", key)):
        assert not any(garbage.remove(g) for g in garbage.find() if g.kind != "source")
    assert sorted(line.split()[0] for line in removed(garbage)) == ["leftover", "source", "work"]


def test_a_removal_that_was_killed_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = planned(tmp_path, 1e-3, days_ago=90)
    planned(tmp_path, 2e-3, days_ago=1)
    garbage = WorkspaceGarbage(old.workspace, STRICT, NOBODY)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    run = garbage.find()[0]
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            garbage.remove(run)
    assert not old.run_dir.exists()
    assert any(g.kind == "leftover" for g in garbage.find())
    removed(garbage)
    assert not list((old.workspace / "runs").glob(".trash-*"))


@pytest.fixture(params=["folder", "s3"])
def archive(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "folder":
        return str(tmp_path / "archive")
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("moto_url"))
    return f"s3://{request.getfixturevalue('bucket')}/archive"


@pytest.fixture
def in_ten_days(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    later = type("Clock", (), {"time": staticmethod(lambda: time.time() + 10 * DAY)})
    monkeypatch.setattr(gc_archive, "time", later)
    return None


def push(plan: RunPlan, learning_rate: float, archive: str) -> Store:
    document = micro_document(plan.workspace.parent, learning_rate=learning_rate)
    document["storage"]["archive"] = archive
    opened = open_archive(parse_config(document), plan)
    assert opened is not None
    for stage in opened.stages:
        assert "MB sent" in opened.push(stage) or "in the archive" in opened.push(stage)
    assert "not in the archive" not in push_run(opened)
    return opened.store


@pytest.mark.usefixtures("in_ten_days")
def test_in_the_archive_too_and_what_stays_is_whole(archive: str, tmp_path: Path) -> None:
    old = planned(tmp_path, 1e-3, days_ago=0)
    store = push(old, 1e-3, archive)
    (tmp_path / "stray").write_text("of an upload that was cut off")
    stray = f"blobs/{sha256_file(tmp_path / 'stray')}"
    store.put(stray, tmp_path / "stray", sha256_file(tmp_path / "stray"))
    new = planned(tmp_path, 2e-3, days_ago=0)
    time.sleep(1.1)  # S3 tells whole seconds
    push(new, 2e-3, archive)
    garbage = ArchiveGarbage(store, StorageConfig(), STRICT, NOBODY)
    kept = ArchiveGarbage(store, StorageConfig(), STRICT, {old.run_key})
    assert [g.name for g in kept.find()] == [stray]
    gone = removed(garbage)
    assert f"run sets/runs/{old.run_dir.name}.json" in gone
    assert f"copy sets/stages/train/{old.stage('train').key}.json" in gone
    assert f"blob {stray}" in gone
    folders = Folders(store, StorageConfig())
    for stage in new.stages:
        found = folders.find(f"stages/{stage.name}/{stage.key}")
        if found is not None:
            folders.get(found, tmp_path / "back" / stage.name)
            assert verify_folder(tmp_path / "back" / stage.name) is not None
    assert len(list((tmp_path / "back").iterdir())) == 5
    assert folders.find(f"stages/train/{old.stage('train').key}") is None


def test_nothing_young_goes_from_an_archive(archive: str, tmp_path: Path) -> None:
    store = push(planned(tmp_path, 1e-3, days_ago=90), 1e-3, archive)
    push(planned(tmp_path, 2e-3, days_ago=0), 2e-3, archive)
    rules = RetentionConfig(keep_runs=0, keep_days=0.0)
    assert ArchiveGarbage(store, StorageConfig(), rules, NOBODY).find() == []


def test_who_names_an_old_content_sends_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between finding a blob there and naming it, `gc` could take it for an orphan."""
    store = open_store(str(tmp_path / "store"), StorageConfig())
    folders = Folders(store, StorageConfig())
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "f").write_text("12345")
    assert folders.put(tmp_path / "a", "x", {}) == 5
    assert folders.put(tmp_path / "a", "y", {}) == 0
    monkeypatch.setattr(folders_module.time, "time", lambda: time.monotonic() + 1e10)
    assert folders.put(tmp_path / "a", "z", {}) == 5


def test_a_content_that_is_named_between_looking_and_removing_stays(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"), StorageConfig())
    folders = Folders(store, StorageConfig())
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "f").write_text("12345")
    folders.put(tmp_path / "a", "stages/train/0", {})
    store.delete("sets/stages/train/0.json")
    age(tmp_path / "store", 8)
    garbage = ArchiveGarbage(store, StorageConfig(), STRICT, NOBODY)
    (orphan,) = garbage.find()
    folders.put(tmp_path / "a", "stages/train/1", {})  # somebody's run, on another machine
    assert not garbage.remove(orphan)
    found = folders.find("stages/train/1")
    assert found is not None
    folders.get(found, tmp_path / "b")


def test_an_archive_with_a_damaged_set_keeps_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebft_core.storage.store.time", SimpleNamespace(sleep=lambda _: None, **CLOCK))
    store = open_store(str(tmp_path / "store"), StorageConfig())
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "f").write_text("12345")
    Folders(store, StorageConfig()).put(tmp_path / "a", "stages/train/0", {})
    path = tmp_path / "store" / "sets" / "stages" / "train" / "0.json"
    path.write_text(path.read_text()[:-20])
    age(tmp_path / "store", 8)
    with pytest.raises(StorageTrouble, match=r"train/0\.json is damaged"):
        ArchiveGarbage(store, StorageConfig(), STRICT, NOBODY).find()
