"""A line in a real registry: what counts as judged, what binds later runs, what another machine fetches."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebft_core.base_model import BaseModelInfo, write_base
from ebft_core.config import parse_config
from ebft_core.data.exclusion import read_exclusion
from ebft_core.data.packing import Row
from ebft_core.data.store import RowWriter
from ebft_core.errors import UserError
from ebft_core.manifests import commit_folder, write_json_atomic
from ebft_core.promotion import Decision
from ebft_core.retrain import Continuation
from ebft_core.runs import RunPlan, plan_run
from orchestration.builders import micro_document
from orchestration.registered import files_of, local_store, register
from tasks.registered_model import DECISION, RegisteredModel
from tasks.retrain_line import FINGERPRINT, JUDGED_ON, STARTED_FROM, Line

pytestmark = pytest.mark.service

BASE = "b" * 64
YES, NO = Decision(True, (), "promoted: better"), Decision(False, (), "refused: worse")


def hash_of(number: int) -> str:
    return f"{number:032x}"


def hashes(*numbers: int) -> set[str]:
    return {hash_of(number) for number in numbers}


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One store for all tests; each has a line of its own."""
    return local_store(tmp_path_factory.mktemp("mlflow"))


def line_of(tmp_path: Path, uri: str, machine: str = "here", **retrain: str) -> Line:
    document = micro_document(tmp_path)
    document |= {"workspace": str(tmp_path / machine), "retrain": retrain}
    document["publish"] = {"registered_model_name": tmp_path.name}
    return Line(parse_config(document), uri)


def finished_run(line: Line, version: str, train: Sequence[int], heldout: Sequence[int]) -> RunPlan:
    """A plan whose stages that `record` reads are committed, as a run would have left them."""
    folder = line.folders.root.parents[1] / f"run-{version}"
    plan = plan_run(line.config)
    stages = tuple(dataclasses.replace(stage, output=folder / stage.name) for stage in plan.stages)
    plan = dataclasses.replace(plan, stages=stages)
    staging = folder / "staging"
    for side, numbers in (("train", train), ("heldout", heldout)):
        with RowWriter(staging / side, folder / f"{side}.arrow") as writer:
            for number in numbers:
                ids = np.full(4, number, dtype=np.int32)
                writer.write(Row(ids, ids, ids > -1, [4], [0], [hash_of(number)]))
    write_json_atomic(staging / "data.json", {"vocabulary": "v", "heldout": {"rows": len(heldout)}})
    commit_folder(staging, plan.stage("tokenize").output, schema="x", meta={})
    staging.mkdir()
    write_base(staging, base_model(folder / "base"))
    commit_folder(staging, plan.stage("prepare_base").output, schema="x", meta={})
    staging.mkdir()
    commit_folder(staging, plan.stage("publish").output, schema="x", meta={"version": version})
    return plan


def base_model(folder: Path, digest: str = BASE) -> BaseModelInfo:
    folder.mkdir(parents=True, exist_ok=True)
    return BaseModelInfo(folder, digest, source="test")


def made(
    line: Line, mark: str, train: Sequence[int], heldout: Sequence[int] = (8, 9), **after: Any
) -> RegisteredModel:
    """Register and record a version; `champion` is the one it went on from."""
    version = register(line.registry.uri, line.registry.name, f"weights {mark}")
    champion = after.get("champion")
    found = Continuation(champion=Path("here")) if champion else Continuation()
    return line.record(finished_run(line, version, train, heldout), mark, found, champion)


def promoted(line: Line, version: RegisteredModel, instead_of: str | None = None) -> RegisteredModel:
    return line.registry.promote(version.version, YES, by="gate", instead_of=instead_of)


def test_only_a_decision_that_was_carried_out_counts(tmp_path: Path, uri: str) -> None:
    line = line_of(tmp_path, uri)
    assert line.judged("one") is None
    version = made(line, "one", [1])
    assert line.judged("one") is None  # published, and then the process was killed
    line.registry.note(version.version, {DECISION: "promoted"})
    assert line.judged("one") is None  # killed before the alias moved
    promoted(line, version)
    assert line.judged("one") is not None
    assert line.judged("two") is None
    second = made(line, "two", [2])
    line.registry.refuse(second.version, NO, by="gate")
    assert line.judged("two") is not None


def test_held_out_rows_are_those_of_the_first_judged_run(tmp_path: Path, uri: str) -> None:
    line = line_of(tmp_path, uri)
    made(line, "killed before its verdict", [1], heldout=[5])
    assert line.judged_on() is None
    first = promoted(line, made(line, "one", [1], heldout=[8, 9]))
    second = made(line, "two", [2], heldout=[7])
    assert second.version == "3"
    notes = [model.tags[JUDGED_ON] for model in line.registry.versions()]
    assert notes[0] == notes[1] != notes[2]
    found = line.continuation(first, base_model(tmp_path / "base"))
    assert found.excluded is not None
    assert read_exclusion_of(found.excluded, line) == hashes(8, 9)


def read_exclusion_of(path: Path, line: Line) -> frozenset[str]:
    return read_exclusion(line.config.data.model_copy(update={"exclude_hashes": str(path)}))


def test_another_machine_fetches_what_it_needs(tmp_path: Path, uri: str) -> None:
    here, there = line_of(tmp_path, uri), line_of(tmp_path, uri, "there")
    champion = promoted(here, made(here, "one", [1]))
    found = there.continuation(champion, base_model(tmp_path / "base"))
    assert found.champion is not None
    assert (found.champion / "model.safetensors").read_text() == "weights one"
    assert found.heldout is not None
    assert found.heldout.is_relative_to(tmp_path / "there")
    here_files = {p.name: p.read_bytes() for p in here.folders.heldout.rglob("*") if p.is_file()}
    assert {p.name: p.read_bytes() for p in found.heldout.rglob("*") if p.is_file()} == here_files
    next(found.heldout.rglob("*.arrow")).write_bytes(b"damaged")
    again = there.continuation(champion, base_model(tmp_path / "base"))
    assert again.heldout is not None
    assert {p.name: p.read_bytes() for p in again.heldout.rglob("*") if p.is_file()} == here_files


def test_damaged_held_out_rows_are_refused(tmp_path: Path, uri: str) -> None:
    line = line_of(tmp_path, uri)
    champion = promoted(line, made(line, "one", [1]))
    note = json.loads(champion.tags[JUDGED_ON])
    next(files_of(note["heldout"]).rglob("*.arrow")).write_bytes(b"damaged")
    line.continuation(champion, base_model(tmp_path / "base"))  # the copy here is whole
    shutil.rmtree(line.folders.heldout)
    with pytest.raises(UserError, match="the frozen held-out rows are damaged"):
        line.continuation(champion, base_model(tmp_path / "base"))


def test_another_base_model_is_refused(tmp_path: Path, uri: str) -> None:
    line = line_of(tmp_path, uri)
    champion = promoted(line, made(line, "one", [1]))
    with pytest.raises(UserError, match="no longer the one that this line began with"):
        line.continuation(champion, base_model(tmp_path / "base", digest="c" * 64))


def test_new_documents_are_those_that_no_model_on_the_way_has_seen(tmp_path: Path, uri: str) -> None:
    line = line_of(tmp_path, uri, train_on="new")
    first = promoted(line, made(line, "one", [1, 2]))
    second = promoted(line, made(line, "two", [3], champion=first), first.version)
    assert (first.tags[STARTED_FROM], second.tags[STARTED_FROM]) == ("base", "1")
    assert (second.tags[FINGERPRINT], line.documents(second)) == ("two", hashes(1, 2, 3))
    base = base_model(tmp_path / "base")
    (after_first, after_second) = (line.continuation(champion, base) for champion in (first, second))
    assert after_first.excluded is not None  # as after a rollback: what only version 2 saw is new again
    assert read_exclusion_of(after_first.excluded, line) == hashes(1, 2, 8, 9)
    assert after_second.excluded is not None
    assert read_exclusion_of(after_second.excluded, line) == hashes(1, 2, 3, 8, 9)


def test_a_champion_with_an_unknown_past_is_refused_for_new_documents_only(tmp_path: Path, uri: str) -> None:
    line = line_of(tmp_path, uri, train_on="new")
    by_hand = register(uri, line.registry.name, "weights")
    champion = line.registry.promote(by_hand, None, by="somebody")
    base = base_model(tmp_path / "base")
    with pytest.raises(UserError, match="nothing says which documents"):
        line.continuation(champion, base)
    found = line_of(tmp_path, uri, train_on="all").continuation(champion, base)
    assert (found.heldout, found.excluded) == (None, None)
    child = made(line, "one", [1], champion=champion)
    assert line.documents(child) is None  # a list with gaps would be worse than none
