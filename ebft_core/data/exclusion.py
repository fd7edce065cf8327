"""Documents that a run leaves out, known by their hashes: neither trained on nor held out."""

from __future__ import annotations

import re
from pathlib import Path

from ebft_core.config import DataConfig
from ebft_core.errors import UserError
from ebft_core.manifests import digest_json

_KEY = "data.exclude_hashes"
_HASH = re.compile(r"[0-9a-f]{32}")


def read_exclusion(config: DataConfig) -> frozenset[str]:
    """The hashes in the file `data.exclude_hashes`; none if the key is unset.

    Raises:
        UserError: the file cannot be read, or a line is no document hash.
    """
    if config.exclude_hashes is None:
        return frozenset()
    path = Path(config.exclude_hashes).expanduser()
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "the file of document hashes cannot be read",
            where=_KEY,
            value=config.exclude_hashes,
            expected="a text file with one hash per line",
            hint=str(error),
        ) from error
    for number, line in enumerate(lines, start=1):
        if not _HASH.fullmatch(line):
            raise UserError(
                "not a document hash", where=f"{path}:{number}", value=line, expected="32 hex characters"
            )
    return frozenset(lines)


def digest_exclusion(config: DataConfig) -> str | None:
    """Hex sha256 of the set of hashes, whatever their order; None if the key is unset. Raises UserError."""
    return None if config.exclude_hashes is None else digest_json(sorted(read_exclusion(config)))
