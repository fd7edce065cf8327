"""The process that owns the server: starts it, watches it, restarts it on its port, ends it with its parent.

The trainer never starts or ends a server. It reads `server.json`; a generation that grew tells it that the
server's adapters are gone and have to be loaded again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ebft_core.events import EventWriter
from ebft_core.stop import StopSignal
from ebft_core.vllm.client import RequestRefused, ServerGone
from ebft_core.vllm.processes import GRACE_SECONDS, check_port, free_port, start_ticks
from ebft_core.vllm.pulse import Pulse
from ebft_core.vllm.server import PORT_TAKEN, Server, StartFailed, StartStopped
from ebft_core.vllm.spec import ServerSpec
from ebft_core.vllm.state import LOG, WANTED, ServerLost, ServerState, wanted_model, write_state
from ebft_core.vllm.sweep import hold_folder

logger = logging.getLogger(__name__)

OnReady = Callable[[ServerState], None]

_PORT_ATTEMPTS = 3
_LOOK_SECONDS = 0.5
_HUNG_GRACE_SECONDS = 2.0


class Keeper:
    """Keeps one server.

    Args:
        spec: what to start.
        folder: of `server.json` and the log.
        events: messages for people.
        stop: ends the keeper and its server.
        on_ready: called whenever the server has become ready.
    """

    def __init__(
        self,
        spec: ServerSpec,
        folder: Path,
        *,
        events: EventWriter,
        stop: StopSignal,
        on_ready: OnReady = lambda state: None,
    ) -> None:
        self._spec = spec
        self._folder = folder
        self._events = events
        self._stop = stop
        self._on_ready = on_ready
        self._server: Server | None = None
        self._failures = 0
        self._state = ServerState(
            url="",
            model_name=spec.served_name,
            nonce=spec.nonce,
            keeper_pid=os.getpid(),
            keeper_ticks=start_ticks(os.getpid()),
            model=str(spec.model),
            model_digest=spec.model_digest,
            max_lora_rank=spec.max_lora_rank,
            max_model_len=spec.max_model_len,
            trainer_gpus=None if spec.gpus.trainer is None else list(spec.gpus.trainer),
            log=str(folder / LOG),
        )

    def run(self, port: int | None = None) -> None:
        """Keep the server until a stop is requested.

        Args:
            port: None takes a free one.

        Raises:
            UserError: the first start failed, the port is taken, or another keeper has the folder.
            ServerLost: it died or hung more often than `vllm.max_restarts`.
        """
        if port is not None:
            check_port(port, where="--port")
        with hold_folder(self._folder):
            (self._folder / WANTED).unlink(missing_ok=True)
            try:
                self._first_start(port)
                while not self._stop.requested:
                    self._restart(self._watch())
            except StartStopped:
                pass
            except BaseException as error:
                self._note(phase="failed", error=_first_line(error))
                raise
            finally:
                self._end_server()
            self._note(phase="stopped")
            self._say("vLLM server stopped")

    def _first_start(self, port: int | None) -> None:
        for attempt in range(_PORT_ATTEMPTS):
            try:
                self._start(free_port() if port is None else port)
                return
            except StartFailed as error:
                # Between finding a free port and binding it somebody else may have been faster.
                if (
                    port is not None
                    or PORT_TAKEN not in error.render().lower()
                    or attempt + 1 == _PORT_ATTEMPTS
                ):
                    raise
                self._say("the port was taken meanwhile; trying another")

    def _start(self, port: int) -> None:
        """Start a server on `port` and wait for its first answer. Raises as `Server.wait_healthy`."""
        self._end_server()
        self._server = server = Server(self._spec, port, self._folder / LOG, self._stop)
        self._note(url=server.url, server_pid=server.pid, server_pgid=server.pid, start_ticks=server.ticks)
        self._say(f"vLLM server starting at {server.url} (log: {server.log})")
        seconds = server.wait_healthy(self._spec.config.vllm.startup_timeout)
        self._note(phase="ready", error=None)
        self._say(f"vLLM server ready after {seconds:.1f} s, generation {self._state.generation}")
        self._on_ready(self._state)

    def _watch(self) -> str | None:
        """Why the server has to be restarted; None: other weights need it, or to stop."""
        server = self._server
        assert server is not None  # started before it is watched
        vllm = self._spec.config.vllm
        client = server.client(vllm.hang_timeout)
        pulse = Pulse(client, vllm.hang_timeout)
        next_look = time.monotonic() + vllm.health_interval
        try:
            while not self._stop.wait(min(_LOOK_SECONDS, vllm.health_interval)):
                how = server.ended()
                if how is not None:
                    return f"died: {how}"
                wanted = wanted_model(self._folder, self._state)
                if wanted is not None and not self._take_as_it_runs(server, wanted):
                    return None
                if time.monotonic() >= next_look:
                    stuck = pulse.stuck()
                    if stuck is not None and server.ended() is None:
                        return f"hangs: {stuck}"
                    next_look = time.monotonic() + vllm.health_interval
        finally:
            client.close()
        return None

    def _take_as_it_runs(self, server: Server, wanted: ServerState) -> bool:
        """Give the running server the wanted weights; False where it needs a restart for them."""
        client = server.client(self._spec.config.vllm.startup_timeout)
        try:
            client.load_weights(str(wanted.model))
        except (RequestRefused, ServerGone) as error:
            self._say(f"vLLM server takes no weights while it runs: {error}")
            return False
        finally:
            client.close()
        self._spec = _with_weights(self._spec, wanted)
        self._note(model=wanted.model, model_digest=wanted.model_digest)
        return True

    def _restart(self, reason: str | None) -> None:
        """Start the server anew on its port, with the weights that are wanted now."""
        while not self._stop.requested:
            if reason is not None:
                self._count_failure(reason)
            wanted = wanted_model(self._folder, self._state)
            if wanted is not None:
                self._spec = _with_weights(self._spec, wanted)
                self._say(f"vLLM server restarts with the weights in {wanted.model}")
            self._note(
                phase="restarting",
                generation=self._state.generation + 1,
                model=str(self._spec.model),
                model_digest=self._spec.model_digest,
            )
            self._end_server(_HUNG_GRACE_SECONDS)
            try:
                self._start(int(self._state.url.rpartition(":")[2]))
                return
            except StartFailed as error:
                reason = f"did not start again: {error.what}, {error.value}"

    def _count_failure(self, reason: str) -> None:
        """Say it, and give up after too many. Raises ServerLost."""
        limit = self._spec.config.vllm.max_restarts
        self._failures += 1
        said = "" if self._server is None else self._server.excerpt()
        logger.warning("vLLM server %s\n%s", reason, said)
        if self._failures > limit:
            raise ServerLost(
                f"the vLLM server {reason}; restarts so far: {limit} (`vllm.max_restarts`)\n{said}"
            )
        self._say(f"vLLM server {reason}; restart {self._failures} of {limit}")

    def _end_server(self, grace_seconds: float = GRACE_SECONDS) -> None:
        if self._server is not None:
            self._server.stop(grace_seconds)

    def _note(self, **changes: object) -> None:
        self._state = replace(self._state, **changes)  # type: ignore[arg-type]
        write_state(self._folder, self._state)

    def _say(self, text: str) -> None:
        logger.info("%s", text)
        self._events.message(text)


def _with_weights(spec: ServerSpec, wanted: ServerState) -> ServerSpec:
    return replace(spec, model=Path(str(wanted.model)), model_digest=str(wanted.model_digest))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
