"""The flow `ebft-arm`: one training of a comparison or a sweep, as far as the model that is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow, runtime

from ebft_core.arms import Stage
from ebft_core.runs import WARM_START
from tasks.accelerator_slot import accelerator_slot
from tasks.flow_names import arm_run_name
from tasks.merge_adapter import merge_adapter
from tasks.prepare_base import prepare_base
from tasks.provision_vllm import vllm_server
from tasks.start_run import started_run
from tasks.tokenize_data import tokenize_data
from tasks.train_policy import train_policy
from tasks.warm_start import warm_start
from tasks.write_report import write_report


@flow(name="ebft-arm", flow_run_name=arm_run_name, persist_result=False, result_serializer="json")
def ebft_arm(
    config: str | dict[str, Any],
    overrides: list[str],
    stage: Stage,
    tags: dict[str, str],
) -> dict[str, Any]:
    """Train one arm; stages whose output verifies are skipped, an interrupted one is resumed.

    Args:
        config, overrides: as flow `ebft` takes them, with the arm's own changes.
        stage: whose output is the arm's model: `sft`, or `merge` after the whole training.
        tags: for the arm's run in MLflow.

    Returns:
        The reference of the stage's output.
    """
    flow_run = {"prefect.flow_run": str(runtime.flow_run.id)}
    with started_run(config, overrides, {**tags, **flow_run}) as run:
        base = prepare_base(run.folder)
        rows = tokenize_data(run.folder, base)
        with accelerator_slot():
            model = start = base if run.config.sft is None else warm_start(run.folder, base, rows)
            if stage != WARM_START:
                with vllm_server(run.folder, start):
                    policy = train_policy(run.folder, start, rows)
                model = merge_adapter(run.folder, start, policy)
        run.tracker.attach(Path(write_report(run.folder)))
        return model
