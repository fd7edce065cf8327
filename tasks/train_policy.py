"""Stage 3: energy-based fine-tuning."""

from __future__ import annotations

from typing import Any

from tasks.provision_vllm import ensure_server, server_needed
from tasks.stage_task import run_stage, stage_task


@stage_task("train", "accelerator")
def train_policy(run_dir: str, base: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    """Return the reference of the trained adapter or model."""
    environment = None
    if server_needed(run_dir):  # a retry after a lost keeper finds a new server
        gpus = ensure_server(run_dir)["trainer_gpus"]
        environment = None if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return run_stage("train", run_dir, [base, rows], environment)
