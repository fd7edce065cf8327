"""Runs the arms of a comparison or a sweep: as many at a time as asked for; a failed one stops no other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from ebft_core.errors import UserError
from ebft_core.vllm.gpus import visible_gpus
from tasks.observe import labelled
from tasks.supervise import STOPPING, stage_environment

Call = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Outcomes:
    """What became of the arms: references of the models that were made, and why the others were not."""

    models: Mapping[str, dict[str, Any]]
    failed: Mapping[str, str]


def run_arms(calls: Mapping[str, Call], *, parallel: int) -> Outcomes:
    """Call every arm's function, `parallel` of them at a time, each on its own GPU if there are enough.

    Raises:
        UserError, StageFailed, …: every arm failed; the first one's error.
        KeyboardInterrupt, …: as it came; the stages that ran were asked to stop.
    """
    gpus = visible_gpus() if parallel > 1 else ()
    devices: SimpleQueue[str | None] = SimpleQueue()
    for number in range(parallel):
        devices.put(gpus[number % len(gpus)] if gpus else None)
    pool = ThreadPoolExecutor(parallel, thread_name_prefix="arm")
    futures: dict[str, Future[dict[str, Any]]] = {}
    try:
        for name, call in calls.items():
            context = copy_context()  # Prefect's parent run and the terminal's observer
            futures[name] = pool.submit(context.run, _run, name, call, devices)
        wait(futures.values())
    except BaseException:
        STOPPING.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return _outcomes(futures)


def _run(name: str, call: Call, devices: SimpleQueue[str | None]) -> dict[str, Any]:
    device = devices.get()
    variables = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
    try:
        with labelled(name, _shown), stage_environment(variables):
            return call()
    finally:
        devices.put(device)


def _shown(stage: str, kind: str) -> bool:
    """Not the report, nor that base and rows are there: a view of many arms has little room."""
    return stage != "report" and not (stage in ("prepare_base", "tokenize") and kind == "skipped")


def _outcomes(futures: Mapping[str, Future[dict[str, Any]]]) -> Outcomes:
    errors = {name: error for name, future in futures.items() if (error := future.exception()) is not None}
    if len(errors) == len(futures):
        raise next(iter(errors.values()))
    models = {name: future.result() for name, future in futures.items() if name not in errors}
    return Outcomes(models, {name: _reason(error) for name, error in errors.items()})


def _reason(error: BaseException) -> str:
    """The first line of what happened."""
    text = error.what if isinstance(error, UserError) else str(error)
    return text.splitlines()[0] if text else type(error).__name__
