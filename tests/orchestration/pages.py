"""Pages of Prefect and MLflow as people see them: headless Chromium runs the scripts and prints the text."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import tempfile

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for path in map(shutil.which, _NAMES) if path), None)

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=f"no browser here: none of {', '.join(_NAMES)}")

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--window-size=1400,2000",
    "--virtual-time-budget=20000",
    "--dump-dom",
)


def shown_text(url: str) -> str:
    """What stands on a page after its scripts ran."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        done = subprocess.run(
            [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", url],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
    visible = re.sub(r"<(style|script)\b.*?</\1>", " ", done.stdout, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", visible)))
