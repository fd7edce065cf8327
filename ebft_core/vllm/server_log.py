"""The end of a server's log, as an error message can carry it: first the reason, then the last lines.

A dying vLLM writes its exception early and hundreds of lines of other libraries' complaints behind it, so the
plain tail of the file often says nothing.
"""

from __future__ import annotations

import re
from pathlib import Path

_TAIL_LINES, _REASONS = 12, 3
_REASON = re.compile(
    r"(?:^|[\s.])(?:[A-Za-z]*(?:Error|Exception)): \S|\berror: |Killed|out of memory", re.ASCII
)
_NOISE = re.compile(
    r"leaked|nanobind|resource_tracker|warnings\.warn|See https|\.\.\. skipped|^\s*$|Avg prompt throughput"
)
_PREFIX = re.compile(r"^(?:\([^)]*\) )?(?:ERROR|WARNING|INFO) [\d-]+ [\d:]+ \[[^\]]*\] ?|^\([^)]*\) ")
_WIDTH = 300


def log_excerpt(log: Path, offset: int = 0) -> str:
    """What the log says from `offset` on: up to three lines that name an error, then its end."""
    try:
        with open(log, "rb") as stream:
            stream.seek(offset)
            text = stream.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return "(no log)"
    lines = [_PREFIX.sub("", line).rstrip()[:_WIDTH] for line in text.splitlines() if not _NOISE.search(line)]
    end = lines[-_TAIL_LINES:]
    reasons = list(dict.fromkeys(line.strip() for line in lines if _REASON.search(line)))[:_REASONS]
    shown = [f"  ! {line}" for line in reasons if line not in end] + [f"  | {line}" for line in end]
    return "\n".join(shown) or "(the log is empty)"
