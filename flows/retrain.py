"""The flow `ebft-retrain`: looks for new data, retrains, and lets the gate decide about the new model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow
from prefect.states import Completed, State

from ebft_core.lease import hold_lease
from ebft_core.retrain import apply_changes, changes_for, check_retrainable, fingerprint, references_for
from ebft_core.runs import workspace_folder
from ebft_core.stage_runner import read_stage_ref
from flows.ebft import ebft
from tasks.flow_names import flow_run_name
from tasks.mlflow_uri import tracking_uri
from tasks.promote_model import promote_model
from tasks.registered_model import RegisteredModel
from tasks.retrain_line import Line
from tasks.retrain_steps import (
    continue_line,
    find_champion,
    look_for_documents,
    look_for_news,
    record_version,
)
from tasks.start_run import read_config

NOTHING_NEW, PROMOTED, REFUSED = "NothingNew", "Promoted", "Refused"
"""Names of the states in which the flow completes."""


@flow(name="ebft-retrain", flow_run_name=flow_run_name, persist_result=False, result_serializer="json")
def ebft_retrain(
    config: str | dict[str, Any], overrides: list[str] | None = None, force: bool = False
) -> State[dict[str, Any]]:
    """Retrain if there is something new, compare with base and champion, promote or refuse.

    Args:
        config: path of a run file, or the same content as an object.
        overrides: changes of a run file, for example `["trainer.max_steps=10"]`.
        force: run although nothing is new; finished stages are skipped, the gate judges anew.

    Returns:
        A state named `NothingNew`, `Promoted` or `Refused` whose message is the reason. Its data are
        `outcome` (that name), `reason`, `name`, `version` where there is one, `run_dir` if there was a run.
    """
    given = read_config(config, overrides or [])
    check_retrainable(given)
    uri = tracking_uri(given, workspace_folder(given))
    line, mark = Line(given, uri), fingerprint(given)
    with hold_lease(line.folders.root):
        known = look_for_news(line, mark)
        if known is not None and not force:
            return _nothing_new(known)
        champion = find_champion(line)
        found = continue_line(line, champion)
        derived = apply_changes(config, overrides or [], changes_for(given, found))
        if given.retrain.train_on == "new" and not look_for_documents(*derived):
            return _no_documents(line)
        result = ebft(*derived)
        record_version(line, result["run_dir"], mark, found, champion)
        decision = promote_model(
            result["run_dir"],
            _ref(result["run_dir"], "publish"),
            _ref(result["run_dir"], "evaluate"),
            references_for(given, found),
            uri,
            champion=None if champion is None else champion.version,
        )
    return _decided(decision, result)


def _nothing_new(known: RegisteredModel) -> State[dict[str, Any]]:
    reason = f"nothing new since {known.name} version {known.version} ({known.created:%Y-%m-%d %H:%M} UTC)"
    return _completed(NOTHING_NEW, reason, name=known.name, version=known.version)


def _no_documents(line: Line) -> State[dict[str, Any]]:
    reason = "something has changed, but every training document is known to the champion already"
    return _completed(NOTHING_NEW, reason, name=line.registry.name)


def _decided(decision: dict[str, Any], result: dict[str, str]) -> State[dict[str, Any]]:
    outcome = PROMOTED if decision["promote"] else REFUSED
    where = {"run_dir": result["run_dir"], "flow_run": result["flow_run"]}
    return _completed(
        outcome, decision["reason"], name=decision["name"], version=decision["version"], **where
    )


def _completed(outcome: str, reason: str, **facts: str) -> State[dict[str, Any]]:
    return Completed(name=outcome, message=reason, data={"outcome": outcome, "reason": reason, **facts})


def _ref(run_dir: str, stage: str) -> dict[str, Any]:
    ref = read_stage_ref(Path(run_dir), stage)
    assert ref is not None  # the run is finished
    return ref.to_json()
