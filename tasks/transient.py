"""The one error that is worth another try. Apart from the tasks, so that it needs no Prefect."""

from __future__ import annotations


class TransientError(Exception):
    """Something outside was away for a moment; the task is worth a retry."""
