"""Stage 3: energy-based fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect.artifacts import create_table_artifact

from tasks.provision_vllm import ensure_server, server_needed
from tasks.stage_task import artifact_key, run_stage, stage_task
from tasks.training_table import training_table


@stage_task("train", "accelerator")
def train_policy(run_dir: str, base: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    """Return the reference of the trained adapter or model."""
    environment = None
    if server_needed(run_dir):  # a retry after a lost keeper finds a new server
        gpus = ensure_server(run_dir)["trainer_gpus"]
        environment = None if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    ref = run_stage("train", run_dir, [base, rows], environment)
    create_table_artifact(
        table=training_table(Path(run_dir) / "events" / "train.jsonl"),
        key=f"{artifact_key('train')}-metrics",
        description="metrics of training; sync/seconds counts the weight syncs",
    )
    return ref
