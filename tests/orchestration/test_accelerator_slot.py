"""The flow takes one slot of the machine's accelerators: once, and for as long as a server may hold GPUs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate
from prefect.settings import PREFECT_API_URL
from prefect.testing.utilities import prefect_test_harness

from flows import ebft as flow_module
from tasks.accelerator_slot import SLOT, accelerator_slot, create_slot


def test_the_flow_takes_the_slot_once_around_everything_that_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    def stage(name: str) -> Callable[..., dict[str, Any]]:
        return lambda *args: seen.append(name) or {}

    @contextlib.contextmanager
    def block(name: str, *args: Any) -> Iterator[Any]:
        seen.append(f"{name} begins")
        yield SimpleNamespace(
            folder="run",
            config=SimpleNamespace(publish=SimpleNamespace(enabled=True), sft=None),
            mlflow_uri="",
            finish=lambda *args: {},
        )
        seen.append(f"{name} ends")

    stages = ("prepare_base", "tokenize_data", "train_policy", "merge_adapter", "evaluate_model")
    for name in (*stages, "publish_model", "write_report"):
        monkeypatch.setattr(flow_module, name, stage(name))
    monkeypatch.setattr(flow_module, "accelerator_slot", lambda: block("slot"))
    monkeypatch.setattr(flow_module, "vllm_server", lambda *args: block("server"))
    monkeypatch.setattr(flow_module, "started_run", lambda *args: block("run"))
    flow_module.ebft.fn("config.yaml")
    assert seen == [
        "run begins",
        "prepare_base",
        "tokenize_data",
        "slot begins",
        "server begins",
        "train_policy",
        "server ends",
        "merge_adapter",
        "evaluate_model",
        "slot ends",
        "publish_model",
        "write_report",
        "run ends",
    ]


@pytest.mark.service
def test_a_second_run_waits_for_the_slot() -> None:
    with prefect_test_harness(server_startup_timeout=60):
        with accelerator_slot(), accelerator_slot():
            pass  # no such limit here: nobody waits
        api = PREFECT_API_URL.value()
        assert api is not None
        create_slot(api)
        create_slot(api)
        taken = threading.Event()
        second = threading.Thread(target=_take, args=(taken,))
        with accelerator_slot():
            second.start()
            assert not taken.wait(3.0)
        assert taken.wait(60.0)
        second.join()
        with get_client(sync_client=True) as client:
            client.update_global_concurrency_limit(SLOT, GlobalConcurrencyLimitUpdate(limit=2))
            create_slot(api)
            assert client.read_global_concurrency_limit_by_name(SLOT).limit == 2  # the user's choice stays


def _take(taken: threading.Event) -> None:
    with accelerator_slot():
        taken.set()
