"""The registry with a real MLflow server: two promoters at once, and processes killed between two calls."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mlflow import MlflowClient

from ebft_core.errors import UserError
from ebft_core.manifests import verify_folder
from ebft_core.promotion import Decision
from orchestration.registered import register
from tasks import registry_files, registry_lock
from tasks.registry import Registry
from tasks.services import free_port, mlflow_server, running
from tasks.transient import TransientError

pytestmark = [pytest.mark.service, pytest.mark.slow]

YES = Decision(True, (), "promoted: better")
KILLED = 9
WRITES = (
    "set_model_version_tag",
    "set_registered_model_tag",
    "set_registered_model_alias",
    "delete_registered_model_tag",
)


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    with running([mlflow_server(tmp_path_factory.mktemp("mlflow"), port)]):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def registry(uri: str) -> Registry:
    """Four versions, no champion."""
    name = uuid.uuid4().hex
    for number in range(4):
        register(uri, name, f"weights {number}")
    return Registry(uri, name)


def at_once(registry: Registry, promote: Callable[[Registry, str], object]) -> list[str]:
    """Promote all versions at the same time, each with a registry of its own; those that got through."""

    def attempt(version: str) -> str | None:
        try:
            promote(Registry(registry.uri, registry.name), version)
        except UserError as error:
            assert error.what == "the champion has changed in the meantime"  # noqa: PT017
            return None
        return version

    with ThreadPoolExecutor(4) as pool:
        return [version for version in pool.map(attempt, ("1", "2", "3", "4")) if version is not None]


def test_of_decisions_about_the_same_champion_one_wins(registry: Registry) -> None:
    winners = at_once(registry, lambda mine, version: mine.promote(version, YES, by="gate"))
    assert len(winners) == 1
    assert registry.champion().version == winners[0]
    assert registry.line() == winners


def test_promotions_by_hand_at_once_all_stand_in_the_line(registry: Registry) -> None:
    everybody = at_once(registry, lambda mine, version: mine.promote(version, None, by="me"))
    assert sorted(registry.line()) == sorted(everybody) == ["1", "2", "3", "4"]
    assert registry.champion().version == registry.line()[-1]


def killed_at_write(number: int, action: Callable[[], object]) -> bool:
    """Run `action` in a process that is gone before its `number`-th write; whether it came so far."""
    child = os.fork()
    if child == 0:
        writes = 0

        def counted(call: Callable[..., object]) -> Callable[..., object]:
            def wrapper(*args: object, **kwargs: object) -> object:
                nonlocal writes
                writes += 1
                if writes == number:
                    os._exit(KILLED)
                return call(*args, **kwargs)

            return wrapper

        for name in WRITES:
            setattr(MlflowClient, name, counted(getattr(MlflowClient, name)))
        action()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


def test_a_promotion_killed_anywhere_leaves_the_old_or_the_new_champion(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_lock, "EXPIRES_SECONDS", 0.1)
    registry.promote("1", None, by="me")
    lines = []
    while killed_at_write(len(lines) + 1, lambda: registry.promote("2", YES, by="gate", instead_of="1")):
        lines.append(registry.line())
        registry.promote("2", YES, by="gate", instead_of="1")  # the same again
        assert registry.line() == ["1", "2"]
        registry.client.set_registered_model_alias(registry.name, "champion", "1")
    assert lines == sorted(lines)
    assert set(map(tuple, lines)) == {("1",), ("1", "2")}


def test_a_rollback_killed_anywhere_leaves_the_old_or_the_new_champion(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_lock, "EXPIRES_SECONDS", 0.1)
    for version in ("1", "2"):
        registry.promote(version, None, by="me")
    lines = []
    for write in (1, 2, 3):  # the announcement, the alias, the first of the tags
        assert killed_at_write(write, lambda: registry.rollback(by="me", reason=""))
        lines.append(registry.line())
        registry.promote("2", None, by="me")
        assert registry.line() == ["1", "2"]
    assert lines == [["1", "2"], ["1", "2"], ["1"]]


def test_a_fetch_killed_in_the_middle_leaves_nothing_that_looks_finished(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    download = registry_files._download

    def one_file_only(source: str, name: str, folder: Path, tracking_uri: str) -> Path:
        if any(folder.rglob("*.*")):
            os._exit(KILLED)
        return download(source, name, folder, tracking_uri)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(registry_files, "_download", one_file_only)
        registry.fetch("1", target)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
    assert not target.exists()
    assert (registry.fetch("1", target) / "model.safetensors").read_text() == "weights 0"
    assert verify_folder(target) is not None
    assert {path.name for path in tmp_path.iterdir()} == {"model", ".model.lock"}


def test_a_change_that_never_ends_is_waited_for_and_then_given_up(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_lock, "WAIT_SECONDS", 0.5)
    with registry_lock.champion_lock(registry.client, registry.name), pytest.raises(TransientError):
        registry.promote("1", None, by="me")
    assert registry.champion() is None
    registry.promote("1", None, by="me")
    assert not [key for key in registry.client.get_registered_model(registry.name).tags if "changing" in key]
