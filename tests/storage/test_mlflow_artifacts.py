"""MLflow's artifacts on S3: written there by the run, read back by the registry."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient
from orchestration.builders import micro_document

from ebft_core.config import RunConfig, parse_config
from ebft_core.errors import UserError
from ebft_core.manifests import digest_folder
from ebft_core.runs import RunPlan, plan_run, write_run_folder
from flows.up import check_artifacts
from tasks.mlflow_store import MlflowStore
from tasks.mlflow_uri import reach_artifacts
from tasks.registered_model import MODEL_DIGEST
from tasks.registered_runs import registered_runs
from tasks.registry import Registry
from tasks.services import free_port, mlflow_server, running
from tests.storage import peers

pytestmark = [pytest.mark.service, pytest.mark.slow]


@pytest.fixture
def no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undone after the test, as what the run sets itself must be."""
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", "")
    monkeypatch.delenv("MLFLOW_S3_ENDPOINT_URL")


@pytest.fixture
def server(tmp_path: Path, moto_url: str, bucket: str, no_endpoint: None) -> Iterator[str]:
    port = free_port()
    with running([mlflow_server(tmp_path / "up", port, f"s3://{bucket}/of-the-server")]):
        yield f"http://127.0.0.1:{port}"


def run(folder: Path, url: str, **tracking: str) -> tuple[RunPlan, RunConfig]:
    document = micro_document(folder) | {"tracking": tracking}
    document["storage"]["endpoint_url"] = url
    config = parse_config(document)
    plan = plan_run(config)
    write_run_folder(plan, config)
    return plan, config


def test_a_model_goes_to_s3_and_comes_back_through_the_registry(
    server: str, moto_url: str, bucket: str, tmp_path: Path
) -> None:
    plan, config = run(tmp_path, moto_url, mlflow_uri=server)
    store = MlflowStore(server, plan, config)
    run_id = store.open_run({})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"1234")
    source = store.log_folder(run_id, tmp_path / "model", "model")
    assert source.startswith(f"s3://{bucket}/of-the-server/")
    key = source.removeprefix(f"s3://{bucket}/") + "/weights"
    assert peers.client(moto_url).get_object(Bucket=bucket, Key=key)["Body"].read() == b"1234"
    store.client.create_registered_model("tuned")
    tags = {"ebft.run_key": plan.run_key, MODEL_DIGEST: digest_folder(tmp_path / "model")}
    version = store.client.create_model_version("tuned", source, run_id=run_id, tags=tags)
    fetched = Registry(server, "tuned").fetch(str(version.version), tmp_path / "fetched")
    assert [p.read_bytes() for p in fetched.rglob("weights")] == [b"1234"]
    assert registered_runs(server) == {plan.run_key}

    elsewhere = f"s3://{bucket}/of-the-experiment"
    plan, config = run(tmp_path, moto_url, mlflow_uri=server, experiment="e", artifact_location=elsewhere)
    run_id = MlflowStore(server, plan, config).open_run({})
    assert str(MlflowClient(server).get_run(run_id).info.artifact_uri).startswith(elsewhere)
    names = [o["Key"] for o in peers.client(moto_url).list_objects_v2(Bucket=bucket)["Contents"]]
    assert any(name.startswith("of-the-experiment/") and name.endswith("config.yaml") for name in names)
    for path in (tmp_path / "up").rglob("*.log"):
        assert peers.SECRET not in path.read_text()


def test_what_the_environment_says_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", "http://mine")
    _, config = run(tmp_path, "http://other")
    reach_artifacts(config)
    assert os.environ["MLFLOW_S3_ENDPOINT_URL"] == "http://mine"


def test_no_registry_no_guess(tmp_path: Path, moto_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert registered_runs(f"sqlite:///{tmp_path / 'never-made.db'}") == frozenset()
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(UserError, match="the registry does not answer"):
        registered_runs(f"http://127.0.0.1:{free_port()}")


def test_a_place_that_cannot_be_used_is_refused_before_anything_starts(
    moto_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_url)
    with pytest.raises(UserError, match="no such bucket"):
        check_artifacts("s3://nobody-made-this/x")
    with pytest.raises(UserError, match="no such place"):
        check_artifacts("/tmp/x")
