"""The flow `ebft`: from text to a tuned, merged, evaluated and registered model."""

from __future__ import annotations

from typing import Any

from prefect import flow, runtime

from tasks.accelerator_slot import accelerator_slot
from tasks.evaluate_model import evaluate_model
from tasks.flow_names import flow_run_name
from tasks.merge_adapter import merge_adapter
from tasks.prepare_base import prepare_base
from tasks.provision_vllm import vllm_server
from tasks.publish_model import publish_model
from tasks.start_run import started_run
from tasks.tokenize_data import tokenize_data
from tasks.train_policy import train_policy
from tasks.warm_start import warm_start
from tasks.write_report import write_report


@flow(name="ebft", flow_run_name=flow_run_name, persist_result=False, result_serializer="json")
def ebft(config: str | dict[str, Any], overrides: list[str] | None = None) -> dict[str, str]:
    """Run the pipeline; stages whose output verifies are skipped, an interrupted one is resumed.

    Args:
        config: path of a run file, or the same content as an object.
        overrides: changes of a run file, for example `["trainer.max_steps=10"]`.

    Returns:
        `{"run_dir", "report", "flow_run"}`: two paths and Prefect's id of this run.
    """
    flow_run = str(runtime.flow_run.id)
    with started_run(config, overrides or [], {"prefect.flow_run": flow_run}) as run:
        base = prepare_base(run.folder)
        rows = tokenize_data(run.folder, base)
        with accelerator_slot():
            start = base if run.config.sft is None else warm_start(run.folder, base, rows)
            with vllm_server(run.folder, start):
                policy = train_policy(run.folder, start, rows)
            model = merge_adapter(run.folder, start, policy)
            evaluation = evaluate_model(run.folder, base, rows, model)
        if run.config.publish.enabled:
            publish_model(run.folder, model, evaluation, run.mlflow_uri)
        report = write_report(run.folder)
        return run.finish(report, flow_run)
