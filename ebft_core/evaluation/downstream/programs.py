"""Run the programs that a model wrote, several sandboxes at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ebft_core.config import SandboxConfig
from ebft_core.evaluation.sandbox import Checks, Verdict, run_tests

Job = tuple[str, Checks]
"""A program, and the tests it has to pass."""


def run_programs(jobs: Sequence[Job], bounds: SandboxConfig, on_verdict: Callable[[], None]) -> list[Verdict]:
    """The verdict on every program, in order; equal jobs run once.

    Args:
        on_verdict: called in the caller's thread after every run; an exception of its ends the work.

    Raises:
        SandboxError: the sandbox did not come up.
    """
    different = list({(program, checks.source): (program, checks) for program, checks in jobs}.values())
    verdicts: dict[tuple[str, str], Verdict] = {}
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        found = pool.map(lambda job: run_tests(job[0], job[1], bounds), different)
        for (program, checks), verdict in zip(different, found, strict=True):
            verdicts[program, checks.source] = verdict
            on_verdict()
    finally:
        pool.shutdown(cancel_futures=True)
    return [verdicts[program, checks.source] for program, checks in jobs]
