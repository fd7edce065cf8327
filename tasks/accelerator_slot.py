"""One run at a time on the machine's accelerators: a slot of Prefect's that the flow takes once.

A limit on the tag of tasks cannot do this: it is free between two tasks of a run, while the run's vLLM server
holds its GPUs, and another run would start its own beside it. A lease that nobody renews ends by itself, so
a killed run does not keep the slot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings

SLOT = "ebft-accelerator"
"""Name of the global concurrency limit. `ebft up` creates it with one slot; other servers may lack it."""


@contextlib.contextmanager
def accelerator_slot() -> Iterator[None]:
    """Hold a slot while the block runs; wait for one if need be. Where there is no such limit, just run."""
    with get_client(sync_client=True) as client:
        limited = _exists(client)
    with concurrency(SLOT, occupy=1) if limited else contextlib.nullcontext():
        yield


def count_slots() -> int:
    """How many runs may compute at a time: the limit's size, or 1 where there is no such limit."""
    with get_client(sync_client=True) as client:
        return client.read_global_concurrency_limit_by_name(SLOT).limit if _exists(client) else 1


def create_slot(api: str) -> None:
    """Create the limit at a Prefect server; one that exists keeps its size."""
    with temporary_settings({PREFECT_API_URL: api}), get_client(sync_client=True) as client:
        if not _exists(client):
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=SLOT, limit=1))


def _exists(client: SyncPrefectClient) -> bool:
    try:
        client.read_global_concurrency_limit_by_name(SLOT)
    except ObjectNotFound:
        return False
    return True
