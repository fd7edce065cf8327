"""The registry: what is verified before a champion changes, and what is left when somebody is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebft_core.errors import UserError
from ebft_core.manifests import verify_folder
from ebft_core.promotion import Decision
from orchestration.registered import NAME, local_store, register, weights_of
from tasks.registry import CHAMPIONS, DECISION, PROMOTED_AT, REASON, Registry, registered_models
from tasks.transient import TransientError

YES = Decision(True, (), "promoted: better")
NO = Decision(False, (), "refused: worse")


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return local_store(tmp_path)


@pytest.fixture
def registry(uri: str, tmp_path: Path) -> Registry:
    """Two versions, no champion."""
    for content in ("one", "two"):
        register(uri, tmp_path, content)
    return Registry(uri, NAME)


def test_versions_are_listed_with_their_aliases(registry: Registry) -> None:
    registry.promote("1", None, by="me")
    newest, oldest = registry.versions()
    assert (newest.version, newest.aliases) == ("2", ())
    assert (oldest.version, oldest.aliases) == ("1", ("champion",))
    assert oldest.created <= newest.created
    assert registered_models(registry.uri) == [NAME]


def test_a_name_that_was_never_registered(uri: str) -> None:
    registry = Registry(uri, "nothing")
    assert registry.versions() == []
    assert registry.champion() is None
    assert registry.line() == []
    with pytest.raises(UserError, match="no such version"):
        registry.promote("1", None, by="me")


def test_the_first_promotion_the_second_and_the_way_back(registry: Registry) -> None:
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


def test_fetch_is_whole_and_repeatable(registry: Registry, tmp_path: Path) -> None:
    model = registry.fetch("1", tmp_path / "fetched" / "v1")
    assert (model / "model.safetensors").read_text() == "one"
    assert (model / "more" / "config.json").read_text() == "{}"
    assert verify_folder(model.parent) is not None
    before = (model / "model.safetensors").stat().st_mtime_ns
    assert registry.fetch("1", tmp_path / "fetched" / "v1") == model
    assert (model / "model.safetensors").stat().st_mtime_ns == before
    assert (registry.fetch("2", tmp_path / "fetched" / "v1") / "model.safetensors").read_text() == "two"
