"""A registry with versions of a model that is a few bytes long."""

from __future__ import annotations

import shutil
from pathlib import Path
from urllib.parse import unquote, urlparse

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from ebft_core.manifests import digest_folder
from tasks.registry import MODEL_DIGEST

NAME = "micro"


def local_store(folder: Path) -> str:
    """A tracking uri that needs no server."""
    return f"sqlite:///{folder / 'mlflow.db'}"


def register(uri: str, folder: Path, content: str, name: str = NAME) -> str:
    """Register a new version whose weights are `content`; returns its number."""
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    model = folder / "new-model"
    (model / "more").mkdir(parents=True)
    (model / "model.safetensors").write_text(content, encoding="utf-8")
    (model / "more" / "config.json").write_text("{}", encoding="utf-8")
    experiment = client.get_experiment_by_name("registry")
    experiment_id = experiment.experiment_id if experiment else _experiment(client, uri, folder)
    run = client.create_run(experiment_id)
    client.log_artifacts(run.info.run_id, str(model), "model")
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        assert error.error_code == "RESOURCE_ALREADY_EXISTS"
    tags = {MODEL_DIGEST: digest_folder(model)}
    source = f"{run.info.artifact_uri}/model"
    version = client.create_model_version(name, source, run_id=run.info.run_id, tags=tags)
    shutil.rmtree(model)
    return str(version.version)


def _experiment(client: MlflowClient, uri: str, folder: Path) -> str:
    local = uri.startswith("sqlite:")
    location = (folder / "art ifacts").as_uri() if local else None
    return str(client.create_experiment("registry", artifact_location=location))


def weights_of(source: str) -> Path:
    """The file that holds the weights of a version whose files lie on this machine."""
    return Path(unquote(urlparse(source).path)) / "model.safetensors"
