"""A workspace on S3: another machine finds the stages, the run's folder and the newest checkpoint."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from orchestration.builders import fake_command, micro_document, write_corpus

from ebft_core.config import RunConfig, parse_config
from ebft_core.errors import ExitCode, UserError
from ebft_core.events import read_events
from ebft_core.manifests import verify_folder
from ebft_core.preflight import check_preflight
from ebft_core.runs import RunPlan, plan_run, write_run_folder
from ebft_core.storage import commands
from ebft_core.storage.archive import open_archive
from ebft_core.storage.run_copies import fetch_checkpoint, kept_checkpoints
from tasks.archived_run import archived_run
from tasks.supervise import StagePreempted
from tests.storage import peers
from tests.storage.test_gc import make


class Machine:
    """A working copy of its own, of the same run."""

    def __init__(self, folder: Path, corpus: str, url: str, bucket: str, **storage: Any) -> None:
        document = micro_document(folder)
        document["model"]["from_scratch"]["sources"] = [corpus]
        document["data"]["sources"] = [{"path": corpus}]
        document["workspace"] = f"s3://{bucket}/team/ebft"
        document["storage"] |= {"local_workspace": str(folder / "local"), "endpoint_url": url, **storage}
        self.config: RunConfig = parse_config(document)
        self.plan: RunPlan = plan_run(self.config)
        check_preflight(self.config, self.plan)

    def start(self, stage: str, behaviour: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            fake_command(stage, self.plan.run_dir, behaviour),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ.copy(),
        )

    def run(self, stage: str, behaviour: str) -> int:
        return self.start(stage, behaviour).wait()

    def journal(self, stage: str) -> list[dict[str, Any]]:
        path = self.plan.run_dir / "events" / f"{stage}.jsonl"
        return read_events(path) if path.exists() else []


@pytest.fixture
def machines(moto_url: str, bucket: str, tmp_path: Path) -> Any:
    corpus = write_corpus(tmp_path / "text")
    return lambda name, **storage: Machine(tmp_path / name, corpus, moto_url, bucket, **storage)


def test_another_machine_goes_on_with_the_run_and_a_person_finds_it(
    machines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = machines("here")

    def fail() -> None:
        with archived_run(here.plan, here.config):
            assert here.run("prepare_base", "work") == ExitCode.DONE
            (here.plan.run_dir / "tracking.json").write_text('{"run_id": "42"}')
            (here.plan.run_dir / "logs" / "train.err.log").write_text("Traceback")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    there = machines("there")
    assert there.plan.run_key == here.plan.run_key
    assert there.plan.workspace == tmp_path / "there" / "local"
    with archived_run(there.plan, there.config):
        assert (there.plan.run_dir / "tracking.json").read_text() == '{"run_id": "42"}'
        assert (there.plan.run_dir / "logs" / "train.err.log").read_text() == "Traceback"
        assert str(tmp_path / "there") in (there.plan.run_dir / "plan.json").read_text()
        assert there.run("prepare_base", "crash") == ExitCode.DONE  # nothing is computed
        (there.plan.run_dir / "report.html").write_text("done")
    location = here.config.workspace
    monkeypatch.setenv("AWS_ENDPOINT_URL", str(here.config.storage.endpoint_url))
    commands.list_runs(location)
    assert capsys.readouterr().out.split()[::3] == [here.plan.run_dir.name, "prepare_base"]
    commands.fetch(location, here.plan.run_dir.name, tmp_path / "desk", ["prepare_base"])
    assert (tmp_path / "desk" / "run" / "report.html").read_text() == "done"
    assert verify_folder(tmp_path / "desk" / "prepare_base") is not None
    for stage, what in (("merge", "not in the archive"), ("prepare_base", "there already")):
        with pytest.raises(UserError, match=what):
            commands.fetch(location, here.plan.run_dir.name, tmp_path / "desk", [stage])


def test_an_interrupted_run_is_not_held_up(machines: Any) -> None:
    here = machines("here")

    def stop() -> None:
        with archived_run(here.plan, here.config):
            (here.plan.run_dir / "report.html").write_text("half")
            raise StagePreempted("asked to")

    with pytest.raises(StagePreempted):
        stop()
    there = machines("there")
    with archived_run(there.plan, there.config):
        assert not (there.plan.run_dir / "report.html").exists()


@pytest.mark.parametrize("minutes", [0.0, 0.005])
def test_another_machine_goes_on_from_the_newest_checkpoint(machines: Any, minutes: float) -> None:
    """At a stop, and (with the interval) also when the machine is lost without a word."""
    here = machines("here", checkpoint_minutes=minutes)
    archive = open_archive(here.config, here.plan)
    assert archive is not None
    with archived_run(here.plan, here.config):
        assert here.run("prepare_base", "work") == ExitCode.DONE
        program = here.start("tokenize", "save")
        copies = "sets/checkpoints/tokenize/"
        while not here.journal("tokenize") or (minutes and not archive.store.list(copies)):
            assert program.poll() is None
            time.sleep(0.05)
        if minutes:
            program.kill()
        else:
            program.terminate()
            assert program.wait(timeout=20) == ExitCode.PREEMPTED
        program.wait()
    there = machines("there", checkpoint_minutes=minutes)
    with archived_run(there.plan, there.config):
        assert [e["step"] for e in there.journal("tokenize") if e["kind"] == "metrics"] == [1]
        assert there.run("prepare_base", "crash") == ExitCode.DONE
        program = there.start("tokenize", "save")
        newest = there.plan.stage("tokenize").work / "checkpoints" / "checkpoint-2"
        while verify_folder(newest) is None:
            assert program.poll() is None
            time.sleep(0.05)
        program.terminate()
        assert program.wait(timeout=20) == ExitCode.PREEMPTED
        assert there.run("tokenize", "work") == ExitCode.DONE
    assert not archive.store.list(copies)  # the finished stage took its place


def test_a_checkpoint_of_other_inputs_is_not_taken(machines: Any) -> None:
    here, there = machines("here"), machines("there")
    for machine in (here, there):
        make(machine.plan.stage("prepare_base"), text=str(machine.plan.workspace))  # one key, two outputs
    archives = [open_archive(machine.config, machine.plan) for machine in (here, there)]
    checkpoint = here.plan.stage("train").work / "checkpoints" / "checkpoint-7"
    for machine in (here, there):
        make(machine.plan.stage("tokenize"))
    make(replace(here.plan.stage("train"), output=checkpoint))
    write_run_folder(here.plan, here.config)
    with kept_checkpoints(archives[0], here.plan.stage("train"), 0.001):
        while not archives[0].store.list("sets/checkpoints/train/"):
            time.sleep(0.02)
    assert fetch_checkpoint(archives[1], there.plan.stage("train")) is None
    shutil.rmtree(here.plan.stage("train").work)
    assert fetch_checkpoint(archives[0], here.plan.stage("train")) == "checkpoint-7"
    assert verify_folder(checkpoint) is not None


def test_the_archive_is_not_given_twice(tmp_path: Path) -> None:
    document = micro_document(tmp_path) | {"workspace": "s3://bucket/x"}
    document["storage"]["archive"] = str(tmp_path)
    with pytest.raises(UserError, match="given twice"):
        parse_config(document)
    with pytest.raises(UserError, match="no such kind of workspace"):
        parse_config(micro_document(tmp_path) | {"workspace": "gs://bucket/x"})


def test_no_credential_is_ever_shown(
    machines: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither in logs, journals and notes, nor in what the service refuses."""
    secret = "very-secret-0123456789abcdefghijklmnop"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA0123456789ABCDEF")
    caplog.set_level("DEBUG", logger="ebft_core")
    here = machines("here")
    with archived_run(here.plan, here.config):
        program = here.start("prepare_base", "work")
        _, errors = program.communicate()
    with pytest.raises(UserError) as caught:
        machines("there", endpoint_url=f"http://127.0.0.1:{peers.free_port()}")
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    for text in [*files, errors, caplog.text.encode(), caught.value.render().encode()]:
        assert secret.encode() not in text
        assert b"AKIA0123456789ABCDEF" not in text
