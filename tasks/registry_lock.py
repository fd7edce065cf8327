"""One change of a model's champion at a time, over all machines that share the registry.

MLflow has no compare-and-set. So whoever wants to move the champion first announces it in a tag of the
registered model and then looks: who sees another's announcement takes its own back and tries again. Of two
that announce together at least one sees the other. The announcement of a process that was killed counts until
it expires.
"""

from __future__ import annotations

import contextlib
import random
import time
import uuid
from collections.abc import Iterator

from mlflow import MlflowClient

from tasks.transient import TransientError

ANNOUNCEMENT = "ebft.changing_champion."
EXPIRES_SECONDS = 120.0
"""Much longer than the few calls that a change takes."""
WAIT_SECONDS = 150.0


@contextlib.contextmanager
def champion_lock(client: MlflowClient, name: str) -> Iterator[None]:
    """Be the only one to change the champion of registered model `name` while the block runs.

    Raises:
        TransientError: others are at it for `WAIT_SECONDS`.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    mine = f"{ANNOUNCEMENT}{uuid.uuid4().hex}"
    while True:
        client.set_registered_model_tag(name, mine, str(time.time() + EXPIRES_SECONDS))
        if not _others(client, name, mine):
            break
        client.delete_registered_model_tag(name, mine)
        if time.monotonic() > deadline:
            raise TransientError(f"somebody else has been changing the champion of {name} all the time")
        time.sleep(random.uniform(0.2, 1.0))
    try:
        yield
    finally:
        client.delete_registered_model_tag(name, mine)


def _others(client: MlflowClient, name: str, mine: str) -> bool:
    """Whether anybody else has announced a change; announcements that expired are removed."""
    others = False
    for key, value in client.get_registered_model(name).tags.items():
        if key.startswith(ANNOUNCEMENT) and key != mine:
            if float(value) > time.time():
                others = True
            else:
                client.delete_registered_model_tag(name, key)
    return others
