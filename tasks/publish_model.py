"""Stage 6: register the merged model, with the digests that say where it comes from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger

from ebft_core.base_model import read_base
from ebft_core.config import RunConfig, load_config
from ebft_core.manifests import (
    StageRef,
    commit_folder,
    digest_folder,
    read_meta,
    verify_folder,
    write_json_atomic,
)
from ebft_core.runs import RunPlan, StagePlan, read_plan
from ebft_core.stage_runner import record_stage
from tasks.observe import notify
from tasks.registered_model import MODEL_DIGEST
from tasks.stage_task import artifact_key, check_inputs, publish_summary, stage_task
from tasks.tracking import wait_for_run_id
from tasks.transient import TransientError

STAGE_KEY = "ebft.stage_key"
_WAIT_SECONDS = 120.0


@stage_task("publish", "registry")
def publish_model(
    run_dir: str, model: dict[str, Any], evaluation: dict[str, Any], mlflow_uri: str
) -> dict[str, Any]:
    """Return the reference of a folder with `publish.json`: name, version, alias, run and model uri.

    A second call finds the version by its stage key and registers nothing.

    Raises:
        TransientError: MLflow is away.
    """
    check_inputs([model, evaluation])
    plan = read_plan(Path(run_dir))
    stage = plan.stage("publish")
    config = load_config(plan.run_dir / "config.yaml")
    notify("publish", "started")
    run_id = wait_for_run_id(plan.run_dir, _WAIT_SECONDS)
    if run_id is None:
        raise TransientError(f"MLflow has not answered for {_WAIT_SECONDS:.0f} seconds")
    before = None if verify_folder(stage.output) is None else read_meta(stage.output)
    version = _register(plan, stage, config, StageRef.from_json(model), mlflow_uri, run_id)
    ref = _commit(stage, version)
    record_stage(plan.run_dir, stage, ref)
    notify("publish", "skipped" if before == version else "done")
    publish_summary(plan, "publish", ref)
    lines = [f"| {key} | `{value}` |" for key, value in version.items()]
    create_markdown_artifact(
        "\n".join(["| registered model | |", "| --- | --- |", *lines]),
        key=f"{artifact_key('publish')}-version",
    )
    get_run_logger().info("model %s version %s", version["name"], version["version"])
    return ref.to_json()


def _register(
    plan: RunPlan, stage: StagePlan, config: RunConfig, model: StageRef, uri: str, run_id: str
) -> dict[str, str]:
    """Find or create the model version; everything said to MLflow may be said twice."""
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.exceptions import MlflowException

    from tasks.mlflow_store import MlflowStore, lineage

    name = config.publish.registered_model_name or config.name
    store = MlflowStore(uri, plan, config)
    try:
        found = store.client.search_model_versions(f"name = '{name}' and tags.`{STAGE_KEY}` = '{stage.key}'")
        if found and verify_folder(stage.output) is not None:
            version: ModelVersion = found[0]  # the alias may have moved on since: leave it
        else:
            _ensure_registered_model(store, name)
            if found:
                version = found[0]
            else:
                base = read_base(plan.stage("prepare_base").output)
                tags = {
                    **lineage(plan),
                    STAGE_KEY: stage.key,
                    "ebft.run_key": plan.run_key,
                    "ebft.base_digest": base.digest,
                    MODEL_DIGEST: digest_folder(model.path / "model"),
                }
                source = store.log_folder(run_id, model.path / "model", "model")
                version = store.client.create_model_version(name, source, run_id=run_id, tags=tags)
            store.client.set_registered_model_alias(name, config.publish.alias, str(version.version))
    except MlflowException as error:
        raise TransientError(f"MLflow: {error}") from error
    return {
        "name": name,
        "version": str(version.version),
        "alias": config.publish.alias,
        "run_id": str(version.run_id),
        "source": str(version.source),
    }


def _ensure_registered_model(store: Any, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        store.client.create_registered_model(name, description="Tuned by EBFT")
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _commit(stage: StagePlan, version: dict[str, str]) -> StageRef:
    if verify_folder(stage.output) is not None and read_meta(stage.output) != version:
        shutil.rmtree(stage.output)  # the registry was emptied since: the note is out of date
    staging = stage.output.with_name(f".staging-{stage.output.name}")
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    write_json_atomic(staging / "publish.json", version)
    return commit_folder(staging, stage.output, schema="ebft.publish/1", meta=version)
