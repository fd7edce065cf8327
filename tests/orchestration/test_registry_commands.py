"""`ebft promote`, `ebft rollback` and `ebft registry list` on a real registry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ebft_core.errors import ExitCode
from flows.cli import app
from orchestration.registered import local_store, register
from tasks.registered_model import DECIDED_BY, REASON
from tasks.registry import Registry


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two registered models, the first with two versions."""
    folder = tmp_path_factory.mktemp("workspace")
    uri = local_store(folder)
    for name, weights in (("poems", "one"), ("poems", "two"), ("letters", "three")):
        register(uri, name, weights)
    return folder


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def ebft(workspace: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--workspace", str(workspace)], env={"COLUMNS": "160"})


def listed(workspace: Path, *arguments: str) -> dict[str, list[dict[str, object]]]:
    return json.loads(ebft(workspace, "registry", "list", *arguments, "--json").stdout)


def test_promote_list_and_roll_back(workspace: Path) -> None:
    assert set(listed(workspace)) == {"poems", "letters"}
    for version in ("1", "2"):
        result = ebft(workspace, "promote", "poems", version, "--reason", "reads well")
        assert result.stdout == f"poems: version {version} is the champion\n"
    newest, oldest = listed(workspace, "poems")["poems"]
    assert (newest["version"], newest["aliases"], oldest["aliases"]) == ("2", ["champion"], [])
    table = ebft(workspace, "registry", "list", "poems").stdout
    assert "champion" in table
    assert "reads well (by " in table
    result = ebft(workspace, "rollback", "poems", "--reason", "it swears")
    assert result.stdout == "poems: version 1 is the champion again\n"
    tags = Registry(f"sqlite:///{workspace}/mlflow.db", "poems").version("2").tags
    assert tags[REASON] == "it swears"
    assert "@" in tags[DECIDED_BY]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("promote", "letters", "7"), "no such version in the registry"),
        (("rollback", "letters"), "there is no earlier champion to go back to"),
        (("registry", "list", "novels"), "no such registered model"),
        (("registry", "list", "--mlflow-uri", "ftp://host"), "MLflow cannot track there"),
        (("registry", "list", "--mlflow-uri", "http://127.0.0.1:9"), "the registry does not answer"),
    ],
)
def test_mistakes_are_said_in_one_message(
    workspace: Path, arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    result = ebft(workspace, *arguments)
    assert result.exit_code == ExitCode.BAD_INPUT
    assert f"error: {said}" in result.stderr
    assert "Traceback" not in result.stderr


def test_looking_makes_no_database(tmp_path: Path) -> None:
    result = ebft(tmp_path, "registry", "list")
    assert result.exit_code == ExitCode.BAD_INPUT
    assert "no runs were tracked here" in result.stderr
    assert list(tmp_path.iterdir()) == []
