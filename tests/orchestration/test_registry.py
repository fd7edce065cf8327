"""The registry: what is verified before a champion changes, and where it leads back to."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from ebft_core.errors import UserError
from ebft_core.manifests import verify_folder
from ebft_core.promotion import Decision
from orchestration.registered import files_of, local_store, register
from tasks.registered_model import DECIDED_BY, DECISION, MODEL_DIGEST, PROMOTED_AT, REASON
from tasks.registry import Registry, registered_models
from tasks.services import free_port
from tasks.transient import TransientError

YES = Decision(True, (), "promoted: better")
NO = Decision(False, (), "refused: worse")


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return local_store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def registry(uri: str) -> Registry:
    """Three versions, no champion."""
    name = uuid.uuid4().hex
    for weights in ("one", "two", "three"):
        register(uri, name, weights)
    return Registry(uri, name)


def test_versions_are_listed_with_their_aliases(registry: Registry) -> None:
    registry.promote("1", None, by="me")
    newest, _, oldest = registry.versions()
    assert (newest.version, newest.aliases) == ("3", ())
    assert (oldest.version, oldest.aliases) == ("1", ("champion",))
    assert oldest.created <= newest.created
    assert registry.name in registered_models(registry.uri)


def test_a_name_that_was_never_registered(uri: str) -> None:
    registry = Registry(uri, "nothing")
    assert registry.versions() == []
    assert registry.champion() is None
    assert registry.line() == []
    with pytest.raises(UserError, match="no such version"):
        registry.promote("1", None, by="me")
    with pytest.raises(UserError, match="no earlier champion"):
        registry.rollback(by="me", reason="")


@pytest.mark.parametrize("version", ["4", "latest", ""])
def test_a_version_that_does_not_exist(registry: Registry, version: str) -> None:
    with pytest.raises(UserError, match="no such version") as error:
        registry.promote(version, None, by="me")
    assert error.value.expected == "3, 2, 1"


def test_promoted_and_rolled_back(registry: Registry) -> None:
    registry.promote("1", YES, by="gate")
    registry.promote("2", YES, by="gate", instead_of="1")
    assert registry.champion().version == "2"
    assert registry.champion().tags[DECISION] == "promoted"
    assert registry.champion().tags[REASON] == YES.reason
    assert PROMOTED_AT in registry.champion().tags
    assert registry.rollback(by="me", reason="it swears").version == "1"
    assert registry.champion().version == "1"
    assert registry.version("2").tags[DECISION] == "rolled back"
    assert registry.version("2").tags[REASON] == "it swears"
    with pytest.raises(UserError, match="no earlier champion"):
        registry.rollback(by="me", reason="again")


def test_what_was_rolled_back_is_not_gone_back_to(registry: Registry) -> None:
    for version in ("1", "2"):
        registry.promote(version, None, by="me")
    registry.rollback(by="me", reason="")
    registry.promote("3", None, by="me")
    assert registry.line() == ["1", "3"]
    assert registry.rollback(by="me", reason="").version == "1"


def test_a_champion_made_by_hand_in_mlflow_is_in_the_line(registry: Registry) -> None:
    registry.promote("1", None, by="me")
    registry.client.set_registered_model_alias(registry.name, "champion", "3")
    assert registry.line() == ["1", "3"]
    registry.promote("2", None, by="me")
    assert registry.rollback(by="me", reason="").version == "3"


def test_an_earlier_champion_can_come_again(registry: Registry) -> None:
    for version in ("1", "2", "1"):
        registry.promote(version, None, by="me")
    assert registry.line() == ["2", "1"]


def test_promoting_the_champion_changes_nothing(registry: Registry) -> None:
    registry.promote("1", None, by="me")
    before = registry.champion()
    assert registry.promote("1", YES, by="gate", instead_of=None) == before


def test_refused_says_why_and_by_whom(registry: Registry) -> None:
    registry.refuse("2", NO, by="gate")
    tags = registry.version("2").tags
    assert (tags[DECISION], tags[REASON], tags[DECIDED_BY]) == ("refused", NO.reason, "gate")
    with pytest.raises(ValueError, match="worse"):
        registry.promote("2", NO, by="gate")
    assert registry.champion() is None


@pytest.mark.parametrize(("instead_of", "found"), [(None, "1"), ("2", "1"), ("2", None)])
def test_a_decision_about_another_champion_moves_nothing(
    registry: Registry, instead_of: str | None, found: str | None
) -> None:
    if found is not None:
        registry.promote(found, None, by="me")
    with pytest.raises(UserError, match="the champion has changed"):
        registry.promote("3", YES, by="gate", instead_of=instead_of)
    champion = registry.champion()
    assert (None if champion is None else champion.version) == found
    assert DECISION not in registry.version("3").tags


def _flip_a_byte(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(bytes([weights.read_bytes()[0] ^ 1]) + weights.read_bytes()[1:])


def _lose_a_file(model: Path) -> None:
    (model / "more" / "config.json").unlink()


def _add_a_file(model: Path) -> None:
    (model / "more" / "code.py").write_text("import os", encoding="utf-8")


@pytest.mark.parametrize("damage", [_flip_a_byte, _lose_a_file, _add_a_file])
def test_damaged_files_are_neither_promoted_nor_fetched_nor_rolled_back_to(
    registry: Registry, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    for version in ("1", "2"):
        registry.promote(version, None, by="me")
    for version in ("1", "3"):
        damage(files_of(registry.version(version).source))
    with pytest.raises(UserError, match="not those that were registered"):
        registry.promote("3", YES, by="gate", instead_of="2")
    with pytest.raises(UserError, match="not those that were registered"):
        registry.rollback(by="me", reason="")
    with pytest.raises(UserError, match="not those that were registered"):
        registry.fetch("3", tmp_path / "v3")
    assert registry.champion().version == "2"
    assert not (tmp_path / "v3").exists()


def test_a_version_without_a_digest_cannot_be_verified(registry: Registry) -> None:
    registry.client.delete_model_version_tag(registry.name, "1", MODEL_DIGEST)
    with pytest.raises(UserError, match="nothing says what the files"):
        registry.promote("1", None, by="me")


def test_fetch_is_whole_and_repeatable(registry: Registry, tmp_path: Path) -> None:
    target = tmp_path / "new" / "champion"
    model = registry.fetch("1", target)
    assert model.is_relative_to(target)
    assert (model / "model.safetensors").read_text() == "one"
    assert (model / "more" / "config.json").read_text() == "{}"
    assert verify_folder(target) is not None
    before = (model / "model.safetensors").stat().st_mtime_ns
    assert registry.fetch("1", target) == model
    assert (model / "model.safetensors").stat().st_mtime_ns == before


def test_fetch_replaces_another_version_and_a_damaged_copy(registry: Registry, tmp_path: Path) -> None:
    model = registry.fetch("1", tmp_path / "v")
    assert (registry.fetch("2", tmp_path / "v") / "model.safetensors").read_text() == "two"
    _flip_a_byte(model)
    assert (registry.fetch("2", tmp_path / "v") / "model.safetensors").read_text() == "two"
    assert files_of(registry.version("2").source).joinpath("model.safetensors").read_text() == "two"


def test_a_dead_server_is_worth_another_try(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    registry = Registry(f"http://127.0.0.1:{free_port()}", "any")
    with pytest.raises(TransientError):
        registry.champion()
    with pytest.raises(TransientError):
        registry.fetch("1", tmp_path / "v")


def test_files_that_cannot_be_reached_are_worth_another_try(registry: Registry, tmp_path: Path) -> None:
    model = files_of(registry.version("1").source)
    model.rename(model.with_name("elsewhere"))
    with pytest.raises((TransientError, UserError)):
        registry.promote("1", None, by="me")
    assert registry.champion() is None
