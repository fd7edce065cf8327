"""After `publish`: the gate judges the new version, perhaps a person too, and the registry follows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.logging import get_run_logger

from ebft_core.bootstrap import PairedEstimate
from ebft_core.config import load_config
from ebft_core.evaluation.summary import Evaluation
from ebft_core.manifests import StageRef, read_meta, write_json_atomic
from ebft_core.promotion import Decision, decide
from ebft_core.runs import read_plan
from tasks.approval import ask
from tasks.mlflow_uri import reach_artifacts
from tasks.observe import notify
from tasks.registered_model import DECISION, REASON
from tasks.report_markdown import markdown_table
from tasks.report_promotion import DECISION_JSON, check_rows
from tasks.stage_task import artifact_key, check_inputs, stage_task
from tasks.transient import TransientError
from tasks.write_report import write_report

GATE = "gate"
"""Who decides where nobody is asked."""


def promote_model(
    run_dir: str,
    published: dict[str, Any],
    evaluation: dict[str, Any],
    references: dict[str, str | None],
    mlflow_uri: str,
    *,
    champion: str | None,
) -> dict[str, Any]:
    """Judge the published version and make it the champion, or say on it why not. To be called from a flow.

    Args:
        run_dir: folder of the run that made it.
        published: reference of stage `publish`.
        evaluation: reference of stage `evaluate`.
        references: `base`, and `champion` if there is one → its name in `evaluate.against`; None: the model
            that the run started from.
        champion: version that `references["champion"]` stands for; None: there is no champion yet.

    Returns:
        The decision, as in `decision.json` of the run's folder.

    Raises:
        TransientError: MLflow is away. UserError: the version's files are damaged, or the champion has
        changed since the comparison.
    """
    config = load_config(Path(run_dir) / "config.yaml")
    version = read_meta(StageRef.from_json(published).path)
    decision = Decision.from_json(judge(run_dir, published, evaluation, references))
    by = GATE
    if decision.promote and config.promotion.require_approval:
        what = f"{version['name']} version {version['version']}"
        decision, by = ask(decision, what, config.promotion.approval_timeout_hours)
    document = {**decision.to_json(), "name": version["name"], "version": version["version"], "by": by}
    apply_decision(run_dir, document, mlflow_uri, champion)
    attach_decision(run_dir, write_report(run_dir), version["run_id"], mlflow_uri)
    return document


@stage_task("judge", "registry")
def judge(
    run_dir: str, published: dict[str, Any], evaluation: dict[str, Any], references: dict[str, str | None]
) -> dict[str, Any]:
    """The gate's decision about the measured numbers, as JSON."""
    check_inputs([published, evaluation])
    config = load_config(Path(run_dir) / "config.yaml")
    path = StageRef.from_json(evaluation).path / "evaluation.json"
    measured = Evaluation.from_json(json.loads(path.read_text(encoding="utf-8")))
    metrics = {gate: _metrics(measured, name) for gate, name in references.items()}
    return decide(metrics, config.promotion).to_json()


@stage_task("promote", "registry")
def apply_decision(run_dir: str, document: dict[str, Any], mlflow_uri: str, champion: str | None) -> None:
    """Tell the registry, Prefect and the run's folder (`decision.json`) what was decided.

    Raises:
        TransientError, UserError: as `Registry.promote`.
    """
    from tasks.registry import Registry  # mlflow takes seconds to import

    notify("promote", "started")
    config = load_config(Path(run_dir) / "config.yaml")
    reach_artifacts(config)
    decision = Decision.from_json(document)
    registry = Registry(mlflow_uri, document["name"], champion_alias=config.promotion.champion_alias)
    if decision.promote:
        registry.promote(document["version"], decision, by=document["by"], instead_of=champion)
    else:
        registry.refuse(document["version"], decision, by=document["by"])
    write_json_atomic(Path(run_dir) / DECISION_JSON, document)
    table = check_rows(decision)
    what = f"{document['name']} version {document['version']}"
    create_table_artifact(table=table, key=artifact_key("promote"), description=f"{what}: {decision.reason}")
    text = f"**{what}** {decision.reason}\n\n{markdown_table(table)}"
    create_markdown_artifact(text, key=f"{artifact_key('promote')}-decision")
    get_run_logger().info("%s: %s", what, decision.reason)
    notify("promote", "message", text=f"{what} {decision.reason}")
    notify("promote", "done")


@stage_task("attach", "registry")
def attach_decision(run_dir: str, report: str, run_id: str, mlflow_uri: str) -> None:
    """Put the decision, and the report that now shows it, beside the run in MLflow.

    Raises:
        TransientError: MLflow is away.
    """
    from mlflow.exceptions import MlflowException

    from tasks.mlflow_store import MlflowStore

    folder = Path(run_dir)
    document = json.loads((folder / DECISION_JSON).read_text(encoding="utf-8"))
    store = MlflowStore(mlflow_uri, read_plan(folder), load_config(folder / "config.yaml"))
    try:
        store.set_tag(run_id, DECISION, "promoted" if document["promote"] else "refused")
        store.set_tag(run_id, REASON, document["reason"])
        store.log_file(run_id, folder / DECISION_JSON)
        store.log_file(run_id, Path(report))
    except MlflowException as error:
        raise TransientError(f"MLflow: {error}") from error


def _metrics(measured: Evaluation, name: str | None) -> Mapping[str, PairedEstimate]:
    return measured.metrics if name is None else measured.against[name].metrics
