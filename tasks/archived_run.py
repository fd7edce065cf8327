"""The run's folder in the archive: fetched if another machine began the run, copied at its start and end."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ebft_core.config import RunConfig
from ebft_core.runs import RunPlan, write_run_folder
from ebft_core.storage.archive import open_archive
from ebft_core.storage.run_copies import fetch_run, push_run
from tasks.supervise import StagePreempted

logger = logging.getLogger(__name__)


@contextmanager
def archived_run(plan: RunPlan, config: RunConfig) -> Iterator[None]:
    """Write the run's folder and keep its copy in the archive, if the run has one.

    A run that is interrupted is not held up: its stage has copied what the next machine needs.
    """
    archive = open_archive(config, plan)
    if archive is not None and fetch_run(archive):
        logger.info("the run's folder was fetched from the archive %s", archive.location)
    write_run_folder(plan, config)
    if archive is None:
        yield
        return
    push_run(archive)
    try:
        yield
    except StagePreempted:
        raise
    except Exception:
        logger.info("%s", push_run(archive))
        raise
    logger.info("%s", push_run(archive))
