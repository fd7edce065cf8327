"""The MLflow side of a run: the parent opens it, copies the journals to it, and alone sets its status."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ebft_core.config import RunConfig
from ebft_core.runs import RunPlan
from tasks.supervise import StagePreempted

if TYPE_CHECKING:
    from tasks.journal_sync import JournalSync

logger = logging.getLogger(__name__)

FINISH_SECONDS = 60.0
KILL_SECONDS = 6.0


@contextlib.contextmanager
def tracked_run(
    plan: RunPlan, config: RunConfig, uri: str, tags: Mapping[str, str] | None = None
) -> Iterator[JournalSync]:
    """Track the run while the block runs; FINISHED, FAILED or KILLED says how the block ended.

    Nothing in here stops the run: where MLflow stays away, the journals wait for the next start.
    """
    from tasks.journal_sync import JournalSync  # mlflow takes seconds to import

    sync = JournalSync(plan, config, uri, tags)
    sync.start()
    status, seconds = "KILLED", KILL_SECONDS
    try:
        yield sync
        status, seconds = "FINISHED", FINISH_SECONDS
    except StagePreempted:
        raise
    except Exception:
        status, seconds = "FAILED", FINISH_SECONDS
        raise
    finally:
        if not sync.close(status, seconds):
            logger.warning(
                "MLflow (%s) did not take everything; the next start of this run sends the rest: %s",
                uri,
                sync.last_error,
            )


def wait_for_run_id(run_dir: Path, seconds: float) -> str | None:
    """The run's id in MLflow, once the tracker has it; None if that takes longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while (run_id := noted_run_id(run_dir)) is None and time.monotonic() < deadline:
        time.sleep(0.5)
    return run_id


def noted_run_id(run_dir: Path) -> str | None:
    """The run's id in MLflow; None if the tracker has not had it yet."""
    note = run_dir / "tracking.json"
    run_id = json.loads(note.read_text(encoding="utf-8")).get("run_id") if note.exists() else None
    return None if run_id is None else str(run_id)
