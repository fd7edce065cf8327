"""The archive: a finished stage is copied, comes back on another machine, and never mixes with other work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from orchestration.builders import fake_command, micro_document, write_corpus

from ebft_core.config import parse_config
from ebft_core.errors import ExitCode, UserError
from ebft_core.events import read_events
from ebft_core.manifests import verify_folder
from ebft_core.preflight import check_preflight
from ebft_core.runs import RunPlan, plan_run, write_run_folder
from ebft_core.storage.archive import archive_notes, open_archive
from flows.dry_run import dry_run
from tests.storage import peers

STAGES = ("prepare_base", "tokenize", "train")


def machine(folder: Path, corpus: str, **storage: Any) -> RunPlan:
    """A planned run in a workspace of its own, on the same text."""
    document = micro_document(folder)
    document["model"]["from_scratch"]["sources"] = [corpus]
    document["data"]["sources"] = [{"path": corpus}]
    document["storage"] |= storage
    config = parse_config(document)
    plan = plan_run(config)
    write_run_folder(plan, config)
    return plan


def run(plan: RunPlan, stage: str, behaviour: str) -> int:
    return subprocess.run(
        fake_command(stage, plan.run_dir, behaviour), check=False, capture_output=True
    ).returncode


def said(plan: RunPlan, stage: str) -> str:
    events = read_events(plan.run_dir / "events" / f"{stage}.jsonl")
    return "\n".join(str(event["text"]) for event in events if event["kind"] == "message")


def command(name: str, plan: RunPlan) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "ebft_core.cli", "archive", name, str(plan.run_dir)]
    return subprocess.run(call, check=False, capture_output=True, text=True, env=os.environ.copy())


@pytest.fixture(params=["folder", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    if request.param == "folder":
        return {"archive": str(tmp_path / "archive")}
    url, bucket = request.getfixturevalue("moto_url"), request.getfixturevalue("bucket")
    return {"archive": f"s3://{bucket}/runs", "endpoint_url": url}


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_corpus(tmp_path / "text")


def test_another_machine_fetches_what_it_would_have_computed(
    storage: dict[str, Any], corpus: str, tmp_path: Path
) -> None:
    here = machine(tmp_path / "here", corpus, **storage)
    for stage in STAGES:
        assert run(here, stage, "work") == ExitCode.DONE
    there = machine(tmp_path / "there", corpus, **storage)
    assert there.run_key == here.run_key
    shown = command("status", there)
    assert [line.split(None, 2)[1:] for line in shown.stdout.splitlines()] == [
        *[["missing", "in the archive"]] * 3,
        *[["missing", "not in the archive"]] * 2,
    ]
    for stage in STAGES:
        assert run(there, stage, "crash") == ExitCode.DONE  # nothing is computed
        ours, theirs = (verify_folder(plan.stage(stage).output) for plan in (here, there))
        assert ours is not None
        assert theirs is not None
        assert theirs.sha256 == ours.sha256
        assert "was fetched from the archive" in said(there, stage)
        assert "MB sent" in said(here, stage)
        assert "sent" not in said(there, stage).split("was fetched")[1]
        journal = read_events(there.run_dir / "events" / f"{stage}.jsonl")
        assert [e["step"] for e in journal if e["kind"] == "metrics"] == [1, 2, 3]
    assert not list(there.workspace.rglob(".restoring-*"))
    shown = command("status", there)
    assert shown.returncode == 0, shown.stderr
    assert [line.split(None, 2)[1:] for line in shown.stdout.splitlines()[:4]] == [
        *[["done", "in the archive"]] * 3,
        ["missing", "not in the archive"],
    ]


def test_an_output_made_from_other_work_is_not_fetched(
    storage: dict[str, Any], corpus: str, tmp_path: Path
) -> None:
    here = machine(tmp_path / "here", corpus, **storage)
    for stage in STAGES:
        assert run(here, stage, "work") == ExitCode.DONE
    alone = machine(tmp_path / "there", corpus)
    assert run(alone, "prepare_base", "work") == ExitCode.DONE  # the same key, another output
    there = machine(tmp_path / "there", corpus, **storage)
    assert run(there, "tokenize", "work") == ExitCode.DONE
    assert "was fetched" not in said(there, "tokenize")


def test_a_part_that_is_missing_or_damaged_is_computed(corpus: str, tmp_path: Path) -> None:
    storage = {"archive": str(tmp_path / "archive"), "deadline_minutes": 1}
    here = machine(tmp_path / "here", corpus, **storage)
    assert run(here, "prepare_base", "work") == ExitCode.DONE
    for blob in (tmp_path / "archive" / "blobs").iterdir():
        blob.unlink()
    there = machine(tmp_path / "there", corpus, **storage)
    assert run(there, "prepare_base", "work") == ExitCode.DONE
    assert "cannot be fetched from the archive" in said(there, "prepare_base")
    assert verify_folder(there.stage("prepare_base").output) is not None
    third = machine(tmp_path / "third", corpus, **storage)
    assert run(third, "prepare_base", "crash") == ExitCode.DONE  # the second machine filled the gap


def test_trouble_fails_no_stage_and_push_catches_up(corpus: str, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    plan = machine(tmp_path / "here", corpus, archive=str(archive))
    archive.mkdir()
    (archive / "sets").touch()  # a file where a folder is needed
    assert run(plan, "prepare_base", "work") == ExitCode.DONE
    assert "not in the archive" in said(plan, "prepare_base")
    (note,) = archive_notes(plan.run_dir)
    assert note.error is not None
    (plan.run_dir / "report.html").write_text("report")
    assert command("push", plan).returncode == ExitCode.INTERNAL
    (archive / "sets").unlink()
    done = command("push", plan)
    assert done.returncode == ExitCode.DONE, done.stdout + done.stderr
    assert [note.error for note in archive_notes(plan.run_dir)] == [None] * len(archive_notes(plan.run_dir))
    there = machine(tmp_path / "there", corpus, archive=str(archive))
    assert run(there, "prepare_base", "crash") == ExitCode.DONE
    (report,) = (archive / "sets" / "runs").glob("*.json")
    kept = {f["path"] for f in json.loads(report.read_text())["files"]}
    assert kept >= {"report.html", "config.yaml", "plan.json", "events/prepare_base.jsonl"}
    assert not [path for path in kept if path.startswith(("stages/", "archive/", "lease"))]


def test_a_base_model_that_lies_elsewhere_is_not_archived(corpus: str, tmp_path: Path) -> None:
    plan = machine(tmp_path / "here", corpus, archive=str(tmp_path / "archive"))
    assert run(plan, "prepare_base", "work") == ExitCode.DONE
    stage = plan.stage("prepare_base")
    config = parse_config(
        micro_document(tmp_path / "here") | {"storage": {"archive": str(tmp_path / "other")}}
    )
    archive = open_archive(config, plan)
    assert archive is not None
    staging = stage.output.with_name("s")
    shutil.copytree(stage.output, staging)
    shutil.rmtree(stage.output)
    (staging / "manifest.json").unlink()
    (staging / "base.json").write_text(json.dumps({"path": str(tmp_path), "digest": "d"}))
    from ebft_core.manifests import commit_folder

    commit_folder(staging, stage.output, schema="ebft.prepare_base/1", meta={})
    assert "not archived" in archive.push(stage)
    assert archive.find(stage) is None


def test_no_archive_no_push(corpus: str, tmp_path: Path) -> None:
    done = command("push", machine(tmp_path, corpus))
    assert done.returncode == ExitCode.BAD_INPUT
    assert "the run has no archive" in done.stderr


def test_an_archive_that_cannot_be_used_is_refused_before_anything_runs(
    moto_url: str, bucket: str, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**storage: Any) -> str:
        config = parse_config(micro_document(tmp_path) | {"storage": {"reserve_gb": 0.0, **storage}})
        with pytest.raises(UserError) as caught:
            check_preflight(config, plan_run(config))
        assert caught.value.where == "storage.archive"
        return caught.value.what

    (tmp_path / "file").touch()
    assert refused(archive=str(tmp_path / "file")) == "the folder cannot be written"
    assert refused(archive="s3://nobody-made-this/x", endpoint_url=moto_url) == "no such bucket"
    nobody = f"http://127.0.0.1:{peers.free_port()}"
    assert refused(archive=f"s3://{bucket}", endpoint_url=nobody) == "the S3 service cannot be reached"


def test_a_dry_run_says_what_would_be_fetched(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = str(tmp_path / "archive")
    here = machine(tmp_path / "here", corpus, archive=archive)
    for stage in STAGES[:2]:
        assert run(here, stage, "work") == ExitCode.DONE
    document = micro_document(tmp_path / "there")
    document["model"]["from_scratch"]["sources"] = [corpus]
    document["data"]["sources"] = [{"path": corpus}]
    document["storage"]["archive"] = archive
    dry_run(parse_config(document))
    rows = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("│")}
    assert [("in the archive" in rows[name], "to do" in rows[name]) for name in STAGES] == [
        (True, False),
        (True, False),
        (False, True),
    ]
    assert not (tmp_path / "there" / "workspace").exists()
