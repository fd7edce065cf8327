"""Whether a run that leaves documents out would have any left to train on. Reads the sources; no torch."""

from __future__ import annotations

from ebft_core.config import RunConfig
from ebft_core.data.exclusion import read_exclusion
from ebft_core.data.remote import remote_of
from ebft_core.data.scan import scan_rows
from ebft_core.data.sources import resolve_sources
from ebft_core.data.split import is_heldout
from ebft_core.data.transforms import get_transform


def count_unseen(config: RunConfig) -> int:
    """Distinct documents on the training side that are not in the file `data.exclude_hashes`.

    Raises:
        UserError: a source cannot be read, or lacks a column that the transform needs.
    """
    data = config.data
    files = resolve_sources(data.sources, remote=remote_of(config))
    found = scan_rows(files, get_transform(data.transform), data, excluded=read_exclusion(data))
    return sum(not is_heldout(key, data.heldout_fraction) for key in set(found.document_hashes))
