"""Brings the policy's adapters to the server, version by version, and back to it after a restart.

A version is written beside its place, renamed, loaded under a name of its own and checked with a canary.
No name is ever used for two sets of weights: the server's cache of prefixes goes by the name. Folders stay
until their version is unloaded, because the server reads an adapter again that it had to put away.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from ebft_core.attention import Backend
from ebft_core.config import RunConfig
from ebft_core.errors import UserError
from ebft_core.vllm.canary import Canary
from ebft_core.vllm.client import RequestRefused, ServerGone, VLLMClient
from ebft_core.vllm.state import ServerLost, wait_ready

logger = logging.getLogger(__name__)

PREFIX = "policy-v"
STAGING = ".staging-"
_POLL_SECONDS = 0.5
_GOODBYE_SECONDS = 3.0
_UNKNOWN_MODEL = 404


@dataclass(frozen=True)
class Publication:
    """A finished weight sync.

    Attributes:
        version: optimiser steps behind the weights.
        name: the model's name in requests.
        seconds: from the first byte written to the canary's answer.
        canary: mean absolute difference of the canary's log-probabilities.
    """

    version: int
    name: str
    seconds: float
    canary: float


class Publisher(Protocol):
    """Brings weights to the server: as adapters, or (full fine-tuning) all of them."""

    def publish(self, version: int) -> Publication:
        """Make the policy's present weights available as `version`."""
        ...

    def name_of(self, version: int) -> str:
        """The model's name in requests. Raises ValueError for a version that is not there."""
        ...

    @property
    def restarts(self) -> int:
        """Restarts of the server noticed so far: what was under way before the last one is lost."""
        ...

    def recover(self) -> None:
        """After a `ServerGone`: wait until the server answers and publish again what a restart took from it.

        Raises:
            ServerLost: it will not come back.
        """
        ...

    def close(self) -> None:
        """Take back what was published."""
        ...


class ServerWatch:
    """Waits for a server and notices its restarts.

    Args:
        client: of the server.
        folder: of its `server.json`; None for a server without one.
        timeout: seconds to wait for it.
    """

    def __init__(self, client: VLLMClient, folder: Path | None, timeout: float) -> None:
        self._client = client
        self._folder = folder
        self._timeout = timeout
        self._generation = self._ready(timeout) or 0

    def wait_until_healthy(self) -> bool:
        """Wait until the server answers; True if it is another process than at the last look.

        Raises:
            ServerLost: its keeper gave up, or the time is over.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            generation = self._ready(deadline - time.monotonic())
            if self._client.health():
                break
            if time.monotonic() > deadline:
                raise ServerLost(f"no answer from the vLLM server at {self._client.url}")
            time.sleep(_POLL_SECONDS)
        restarted = generation is not None and generation != self._generation
        self._generation = generation or 0
        return restarted

    def _ready(self, timeout: float) -> int | None:
        if self._folder is None:
            return None
        return wait_ready(self._folder, timeout=timeout).generation


class AdapterPublisher:
    """A `Publisher` of LoRA adapters.

    Args:
        client: of the server; its model name is the base model.
        folder: for the adapters' folders; this publisher alone uses it, what it finds there is removed.
        policy: a PEFT model.
        canary_ids: the canary's text.
        config: staleness bound, canary tolerance, waiting times.
        server_folder: of `server.json`; None for a server without one.
        attention: backend of the trainer's forward pass.
    """

    def __init__(
        self,
        client: VLLMClient,
        folder: Path,
        policy: nn.Module,
        canary_ids: Sequence[int],
        config: RunConfig,
        *,
        server_folder: Path | None = None,
        attention: Backend = "sdpa",
    ) -> None:
        self._client = client
        self._folder = folder.resolve()
        self._policy: Any = policy
        self._canary = Canary(canary_ids, config.rollout.canary_tolerance, attention)
        self._bound = config.rollout.staleness_bound
        self._watch = ServerWatch(client, server_folder, config.vllm.startup_timeout)
        self._names: dict[int, str] = {}
        self._loaded: set[int] = set()
        self._restarts = 0
        self._lock = threading.RLock()  # a thread that generates ahead may recover while another publishes
        self._remove_leftovers()

    def publish(self, version: int) -> Publication:
        """Save, load and check the present adapter; unload versions beyond the staleness bound.

        Raises:
            ValueError: the version was published before.
            UserError: the server refuses the adapter, or the canary differs.
            ServerGone: the server does not answer, and was not restarted.
            ServerLost: it will not come back.
        """
        with self._lock:
            if version in self._names:
                raise ValueError(f"version {version} is published already")
            began = time.monotonic()
            self._names[version] = self._save(version)
            try:
                difference = self._load_and_check(version)
            except (UserError, ServerGone, ServerLost, RequestRefused) as error:
                self._unload(version, ask=isinstance(error, UserError))
                raise
            for old in [v for v in self._names if v < version - self._bound]:
                self._unload(old)
            return Publication(version, self._names[version], time.monotonic() - began, difference)

    def republish(self) -> int:
        """Load the versions that the server does not have (any more); how many those were.

        Raises:
            UserError, ServerGone: as `publish`.
        """
        with self._lock:
            there = {model.name for model in self._client.models()}
            missing = [version for version, name in self._names.items() if name not in there]
            if self._loaded.intersection(missing):
                self._watch.wait_until_healthy()  # takes note of the generation
                self._restarts += 1
                logger.info("the vLLM server was restarted; adapters are loaded again")
            for version in missing:
                self._load(version)
            return len(missing)

    @property
    def restarts(self) -> int:
        """Restarts of the server noticed so far."""
        return self._restarts

    def recover(self) -> None:
        """Wait until the server answers and load again what it lost.

        Raises:
            ServerLost: it will not come back. UserError, ServerGone: as `publish`.
        """
        with self._lock:
            noticed = self._restarts
            restarted = self._watch.wait_until_healthy()
            self.republish()
            if restarted and self._restarts == noticed:  # there was nothing to lose yet
                self._restarts += 1

    def name_of(self, version: int) -> str:
        """The adapter's name in requests. Raises ValueError for a version that is not loaded."""
        if version not in self._names:
            raise ValueError(f"version {version} is not published; these are: {sorted(self._names)}")
        return self._names[version]

    def close(self) -> None:
        """Unload and remove everything; a server that is gone already is no error."""
        answers = self._client.health()
        self._client.timeout, self._client.attempts = _GOODBYE_SECONDS, 1  # the end waits for nobody
        for version in list(self._names):
            self._unload(version, ask=answers)

    def _save(self, version: int) -> str:
        name = f"{PREFIX}{version}-{secrets.token_hex(3)}"
        staging = self._folder / f"{STAGING}{version}"
        self._policy.save_pretrained(str(staging), safe_serialization=True)
        staging.rename(self._folder / name)
        return name

    def _load_and_check(self, version: int) -> float:
        """The canary's difference; once more from the start if the server is restarted on the way."""
        while True:
            restarts = self._restarts
            try:
                self.republish()
                return self._canary.check(self._client, self._names[version], self._policy)
            except (ServerGone, RequestRefused) as error:
                if isinstance(error, RequestRefused) and error.status != _UNKNOWN_MODEL:
                    raise
                self.recover()
                if self._restarts == restarts:
                    raise

    def _load(self, version: int) -> None:
        name = self._names[version]
        try:
            self._client.load_adapter(name, str(self._folder / name))
        except RequestRefused as error:
            raise UserError(
                "the server refuses the policy's adapter",
                where="lora",
                value=f"{name}: {error}",
                expected="an adapter whose rank and modules the server takes, in a folder it can read",
                hint="of a server of your own: --max-lora-rank at least `lora.r`, --enable-lora, and this "
                f"folder on its machine: {self._folder}",
            ) from error
        self._loaded.add(version)

    def _unload(self, version: int, *, ask: bool = True) -> None:
        """Forget a version; `ask` the server to do so, too."""
        name = self._names.pop(version)
        self._loaded.discard(version)
        try:
            if ask:
                self._client.unload_adapter(name)
        except (ServerGone, RequestRefused) as error:  # a restarted server has forgotten it by itself
            logger.info("adapter %s was not unloaded: %s", name, error)
        shutil.rmtree(self._folder / name)

    def _remove_leftovers(self) -> None:
        """Unload and remove what an earlier, killed process of this run left."""
        for model in self._client.models():
            if model.parent is not None and model.root and Path(model.root).parent == self._folder:
                self._client.unload_adapter(model.name)
        if self._folder.exists():
            shutil.rmtree(self._folder)
        self._folder.mkdir(parents=True)
