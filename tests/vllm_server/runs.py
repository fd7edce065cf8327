"""Planned runs whose base model is a given folder: what the keeper program and the flow's task start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ebft_core.base_model import BaseModelInfo, digest_model_folder, write_base
from ebft_core.config import parse_config
from ebft_core.manifests import StageRef, commit_folder
from ebft_core.runs import RunPlan, plan_run, write_run_folder
from tests.orchestration.builders import write_corpus
from tests.vllm_server.builders import QUICK


def run_document(folder: Path, model: Path, python: Path, **sections: Any) -> dict[str, Any]:
    """The content of a run file that serves `model` by `python`."""
    document: dict[str, Any] = {
        "name": "served",
        "workspace": str(folder / "workspace"),
        "model": {"name_or_path": str(model)},
        "data": {"sources": [{"path": write_corpus(folder / "text", 2)}], "sequence_length": 64},
        "ebft": {"max_completion_length": 32},
        "lora": {"r": 4, "alpha": 8.0},
        "vllm": {**QUICK, "python": str(python)},
    }
    for name, values in sections.items():
        document[name] = {**document.get(name, {}), **values}
    return document


def prepared_run(folder: Path, model: Path, python: Path, **sections: Any) -> tuple[RunPlan, StageRef]:
    """A planned run whose stage `prepare_base` is done, and that stage's reference."""
    config = parse_config(run_document(folder, model, python, **sections))
    plan = plan_run(config)
    write_run_folder(plan, config)
    output = plan.stage("prepare_base").output
    staging = output.with_name("staging")
    staging.mkdir(parents=True)
    write_base(staging, BaseModelInfo(model, digest_model_folder(model), str(model)))
    return plan, commit_folder(staging, output, schema="ebft.prepare_base/1", meta={})
