"""Tells a working server from a hung one within a bounded time.

A busy server may let a small request wait for long and is fine; a hung one may still answer /health and
compute nothing. So the sign of life is progress: counters that move, or, on an idle server, a completion.
"""

from __future__ import annotations

import time

from ebft_core.vllm.client import RequestRefused, ServerGone, VLLMClient

_PROBE = (1, 2)
_SHORTEST = 0.2


class Pulse:
    """Looks at one server.

    Args:
        client: one attempt per request; its timeout does not matter.
        hang_timeout: seconds without progress after which `stuck` says so.
    """

    def __init__(self, client: VLLMClient, hang_timeout: float) -> None:
        self._client = client
        self._hang_timeout = hang_timeout
        self._last_progress = time.monotonic()
        self._counters = ""

    def stuck(self) -> str | None:
        """Look once; why the server counts as hung, or None. Takes at most what is left of the timeout."""
        try:
            if self._progressed():
                self._last_progress = time.monotonic()
                return None
            problem = "nothing is computed"
        except (ServerGone, RequestRefused) as error:
            problem = str(error)
        silent = time.monotonic() - self._last_progress
        return f"no progress for {silent:.0f} s: {problem}" if silent >= self._hang_timeout else None

    def _progressed(self) -> bool:
        counters = self._client.progress(timeout=self._left(share=0.5))
        if counters != self._counters:
            self._counters = counters
            return True
        self._client.complete(_PROBE, max_tokens=1, timeout=self._left())
        return True

    def _left(self, share: float = 1.0) -> float:
        left = self._last_progress + self._hang_timeout - time.monotonic()
        return max(_SHORTEST, share * left)
