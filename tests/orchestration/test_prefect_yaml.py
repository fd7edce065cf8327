"""`prefect.yaml`: Prefect ignores keys it does not know, so its own models are asked about every key."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.cli.deploy._models import (
    ConcurrencyLimitSpec,
    DeploymentConfig,
    PrefectYamlModel,
    RawScheduleConfig,
    WorkPoolConfig,
)
from prefect.cli.deploy._triggers import _initialize_deployment_triggers
from prefect.client.schemas.schedules import CronSchedule
from prefect.events import DeploymentEventTrigger, Event
from prefect.events.schemas.automations import Posture
from pydantic import BaseModel

from ebft_core.config import load_config

ROOT = Path(__file__).parents[2]
ANCHORS = "definitions"
"""Prefect's documented place for YAML anchors; its model ignores it."""


def known_keys(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def unknown_keys(document: dict[str, Any]) -> set[str]:
    found = set(document) - known_keys(PrefectYamlModel) - {ANCHORS}
    for deployment in document["deployments"]:
        found |= set(deployment) - known_keys(DeploymentConfig)
        found |= set(deployment["work_pool"]) - known_keys(WorkPoolConfig)
        found |= set(deployment.get("concurrency_limit", {})) - known_keys(ConcurrencyLimitSpec)
        for schedule in deployment.get("schedules", []):
            found |= set(schedule) - known_keys(RawScheduleConfig)
        for trigger in deployment.get("triggers", []):
            found |= set(trigger) - known_keys(DeploymentEventTrigger)
    return found


@pytest.fixture
def document() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))


def test_every_key_is_one_that_prefect_reads(document: dict[str, Any]) -> None:
    PrefectYamlModel.model_validate(document)
    assert unknown_keys(document) == set()


@pytest.mark.parametrize("place", ["top", "deployment", "pool", "limit", "schedule", "trigger"])
def test_a_misspelt_key_is_found(document: dict[str, Any], place: str) -> None:
    (deployment,) = [d for d in document["deployments"] if d["name"] == "weekly"]
    folder = {
        "top": document,
        "deployment": deployment,
        "pool": deployment["work_pool"],
        "limit": deployment["concurrency_limit"],
        "schedule": deployment["schedules"][0],
        "trigger": deployment["triggers"][0],
    }[place]
    folder["entry_point"] = 1
    assert unknown_keys(document) == {"entry_point"}


def test_every_deployment_names_a_flow_and_parameters_that_it_takes(document: dict[str, Any]) -> None:
    for deployment in document["deployments"]:
        path, name = deployment["entrypoint"].split(":")
        flow = getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), name)
        assert isinstance(flow, Flow)
        flow.validate_parameters(deployment["parameters"])
        load_config(ROOT / deployment["parameters"]["config"], deployment["parameters"]["overrides"])


def test_every_deployment_queues_a_second_run(document: dict[str, Any]) -> None:
    for deployment in document["deployments"]:
        assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}


@pytest.mark.parametrize(
    ("name", "mode", "ahead"),
    [("strided", "strided", 0), ("structured", "structured", 0), ("structured-async", "structured", 1)],
)
def test_a_deployment_runs_what_its_name_says(
    document: dict[str, Any], name: str, mode: str, ahead: int
) -> None:
    (deployment,) = [d for d in document["deployments"] if d["name"] == name]
    config = load_config(ROOT / deployment["parameters"]["config"], deployment["parameters"]["overrides"])
    assert (config.ebft.mode, config.rollout.prefetch_depth) == (mode, ahead)
    assert mode == "strided" or config.rollout.use_vllm


def test_retraining_waits_to_be_switched_on_and_listens_for_new_data(document: dict[str, Any]) -> None:
    (deployment,) = [d for d in document["deployments"] if d["name"] == "weekly"]
    assert deployment["entrypoint"] == "flows/retrain.py:ebft_retrain"
    (schedule,) = deployment["schedules"]
    assert schedule["active"] is False
    CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"])
    (trigger,) = _initialize_deployment_triggers("weekly", deployment["triggers"])
    event = Event(event="ebft.dataset.updated", resource={"prefect.resource.id": "ebft.dataset.x"})
    assert event.event in trigger.expect
    assert trigger.match.matches(event.resource)
    assert trigger.enabled
    assert trigger.posture is Posture.Reactive
