"""One server process: start, wait until it truly works, end with everything it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from ebft_core.errors import UserError
from ebft_core.stop import StopSignal
from ebft_core.vllm.client import RequestRefused, ServerGone, VLLMClient
from ebft_core.vllm.identity import check_own, warm_up
from ebft_core.vllm.processes import GRACE_SECONDS, HOST, end_group, start_ticks
from ebft_core.vllm.server_log import log_excerpt
from ebft_core.vllm.spec import ServerSpec

_GUARDED = Path(__file__).with_name("guarded_exec.py")
_POLL_SECONDS = 0.2
_LOOK_SECONDS = 5.0
_SETTLE_SECONDS = 2.0
PORT_TAKEN = "address already in use"


class StartFailed(UserError):  # noqa: N818
    """The server did not come up; carries what its log says."""


class StartStopped(Exception):  # noqa: N818
    """Whoever waited for the server was asked to stop."""


class Server:
    """A server process in a session and process group of its own, its output appended to a file.

    It ends with the process that started it, however that ends (see `guarded_exec.py`). A stop
    request reaches the server at once, also while its owner waits for an answer from it.
    """

    def __init__(self, spec: ServerSpec, port: int, log: Path, stop: StopSignal) -> None:
        self.spec = spec
        self.port = port
        self.log = log
        self._stop = stop
        self._reaping = threading.Lock()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = log.stat().st_size if log.exists() else 0
        guard, self._tether = os.pipe()  # our end is never written to: its closing wakes the guard
        with open(log, "ab") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARDED), str(guard), *spec.command(port)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                cwd=log.parent,
                env=spec.environment(),
                start_new_session=True,
                pass_fds=(guard,),
            )
        os.close(guard)
        self.pid = self._process.pid
        self.ticks = start_ticks(self.pid)
        threading.Thread(target=self._end_on_request, daemon=True, name="vllm-stop").start()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self.port}"

    def client(self, timeout: float, attempts: int = 1) -> VLLMClient:
        """A client of this server."""
        return VLLMClient(self.url, self.spec.served_name, timeout, attempts)

    def ended(self) -> str | None:
        """How the process ended; None while it runs. It stays unreaped, so that its group keeps its id."""
        status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return None
        by_signal = status.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        return f"it was killed by signal {status.si_status}" if by_signal else f"exit code {status.si_status}"

    def wait_healthy(self, seconds: float) -> float:
        """Wait until this very server has answered a completion; returns the seconds it took.

        Raises:
            StartFailed: it ended, the time is over, or somebody else answers on its port.
            StartStopped: a stop was requested.
        """
        began = time.monotonic()
        client = self.client(_LOOK_SECONDS)
        try:
            while not self._answers(client):
                self._check(began, seconds)
                self._stop.wait(_POLL_SECONDS)
            check_own(client, self.spec)
            client.timeout = max(1.0, began + seconds - time.monotonic())  # first answers compile code
            warm_up(client, self.spec.config)
        except (ServerGone, RequestRefused) as error:
            self._settle()
            self._check(began, seconds)
            raise self._failed("the vLLM server listens but does not work", str(error)) from error
        finally:
            client.close()
        return time.monotonic() - began

    def stop(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """End the whole process group: SIGTERM, then SIGKILL. Safe to call twice."""
        if self._process.returncode is not None:
            return
        # The leader is not reaped yet, so its group id cannot belong to anybody else.
        end_group(self.pid, grace_seconds=grace_seconds)
        with self._reaping:
            self._process.wait()
        os.close(self._tether)

    def excerpt(self) -> str:
        """What its log says about this start."""
        return log_excerpt(self.log, self._log_start)

    def _answers(self, client: VLLMClient) -> bool:
        try:
            client.models()
        except ServerGone:
            return False
        return True

    def _end_on_request(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            if self._process.returncode is not None:
                return
        with self._reaping:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGTERM)

    def _settle(self) -> None:
        """A server that loses its engine answers 5xx first and ends a moment later."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while self.ended() is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _check(self, began: float, seconds: float) -> None:
        if self._stop.requested:
            raise StartStopped(self._stop.reason)
        how = self.ended()
        if how is not None:
            raise self._failed("the vLLM server ended while it was starting", how)
        if time.monotonic() - began > seconds:
            raise self._failed(
                "the vLLM server did not start in time", f"{seconds:.0f} s", where="vllm.startup_timeout"
            )

    def _failed(self, what: str, value: str, where: str | None = None) -> StartFailed:
        said = self.excerpt()
        if PORT_TAKEN in said.lower():
            what, where = "the vLLM server's port was taken while it was starting", f"port {self.port}"
        return StartFailed(
            what,
            where=where or str(self.log),
            value=value,
            expected="one completion from the server",
            hint=f"its log, {self.log}, says:\n{said}",
        )
