"""The section `retention` of a run file: what `ebft gc` keeps."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ebft_core.config.section import NonNegative, NonNegativeInt, Section


class RetentionConfig(Section):
    """What `ebft gc` keeps. A run is removed only if none of the rules keeps it, and a stage only with the
    last run that it belongs to."""

    keep_runs: NonNegativeInt = 10
    """Newest runs kept of every name."""
    keep_days: NonNegative = 30.0
    """Runs of these days are kept, and the contents of sources, which can be fetched again."""
    keep_registered: bool = True
    """Runs whose models are registered in MLflow are kept."""
    abandoned_days: NonNegative = 7.0
    """Unfinished work that nobody has touched for so long is removed, whatever run it belongs to."""
    orphan_days: Annotated[float, Field(ge=2.0)] = 7.0
    """What no run in the archive names is kept for so long: its run may be about to name it."""
