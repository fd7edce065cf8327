"""Versions of a model that is a few bytes long, in a real MLflow."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from urllib.parse import unquote, urlparse

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from ebft_core.manifests import digest_folder
from tasks.registered_model import MODEL_DIGEST

EXPERIMENT = "registry"


def local_store(folder: Path) -> str:
    """A tracking uri that needs no server; its files lie in a folder whose name has to be quoted."""
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    client.create_experiment(EXPERIMENT, artifact_location=(folder / "art ifacts").as_uri())
    return uri


def register(uri: str, name: str, weights: str) -> str:
    """Register a new version of model `name`; returns its number."""
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    run = client.create_run(experiment.experiment_id if experiment else client.create_experiment(EXPERIMENT))
    source = f"{run.info.artifact_uri}/model"
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch)
        (model / "more").mkdir()
        (model / "model.safetensors").write_text(weights, encoding="utf-8")
        (model / "more" / "config.json").write_text("{}", encoding="utf-8")
        client.log_artifacts(run.info.run_id, scratch, "model")
        tags = {MODEL_DIGEST: digest_folder(model)}
    with contextlib.suppress(MlflowException):  # it exists already
        client.create_registered_model(name)
    return str(client.create_model_version(name, source, run_id=run.info.run_id, tags=tags).version)


def files_of(source: str) -> Path:
    """The folder of a version's files, where they lie on this machine."""
    return Path(unquote(urlparse(source).path))
