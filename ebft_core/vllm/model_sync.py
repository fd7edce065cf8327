"""Full fine-tuning: there is no adapter to load, so the server gets all weights, from a folder.

The keeper gives them to the server as it runs, or restarts it where it offers no such thing. Nothing may be
under way when this happens, or it would go on with newer weights than it is marked with.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ebft_core.attention import Backend
from ebft_core.base_model import digest_model_folder
from ebft_core.config import RunConfig
from ebft_core.errors import UserError
from ebft_core.vllm.canary import Canary
from ebft_core.vllm.client import VLLMClient
from ebft_core.vllm.state import read_state, wait_ready, want_model
from ebft_core.vllm.sync import PREFIX, STAGING, Publication, ServerWatch


class ModelPublisher:
    """A `Publisher` of whole models.

    Args:
        client: of the run's own server.
        folder: for the models' folders; what it finds there is removed, except what the server serves.
        policy: the model.
        tokenizer: saved beside the weights; a server does not start without one.
        canary_ids: the canary's text.
        config: canary tolerance, waiting times.
        server_folder: of `server.json`.
        attention: backend of the trainer's forward pass.

    Raises:
        UserError: the server is run by the user, so nobody here can restart it.
    """

    def __init__(
        self,
        client: VLLMClient,
        folder: Path,
        policy: nn.Module,
        tokenizer: Any,
        canary_ids: Sequence[int],
        config: RunConfig,
        *,
        server_folder: Path,
        attention: Backend = "sdpa",
    ) -> None:
        state = read_state(server_folder)
        if state is None or not state.kept:
            raise UserError(
                "a server of your own cannot be given all weights of a model while it runs",
                where="vllm.url, lora",
                value=client.url,
                expected="a server that the run starts and may restart, or adapters",
                hint="leave `vllm.url` out, or train adapters (`lora`)",
            )
        self._client = client
        self._folder = folder.resolve()
        self._policy: Any = policy
        self._tokenizer = tokenizer
        self._canary = Canary(canary_ids, config.rollout.canary_tolerance, attention)
        self._server_folder = server_folder
        self._timeout = config.vllm.startup_timeout
        self._watch = ServerWatch(client, server_folder, self._timeout)
        self._version: int | None = None
        self._restarts = 0
        self._session = secrets.token_hex(3)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_all_but(None if state.model is None else Path(state.model))

    def publish(self, version: int) -> Publication:
        """Save the model, have the server take it and check it. Nothing may be under way.

        Raises:
            ServerLost: the server does not come back.
            UserError: the canary differs.
            ServerGone, RequestRefused: the canary was not answered.
        """
        began = time.monotonic()
        name = f"{PREFIX}{version}-{self._session}"
        staging, target = self._folder / f"{STAGING}{name}", self._folder / name
        self._policy.save_pretrained(str(staging), safe_serialization=True)
        self._tokenizer.save_pretrained(str(staging))
        staging.rename(target)
        digest = digest_model_folder(target)
        want_model(self._server_folder, target, digest)
        wait_ready(self._server_folder, timeout=self._timeout, serving=digest)
        self._watch.wait_until_healthy()  # takes note of a new generation, which is no accident
        difference = self._canary.check(self._client, self._client.model_name, self._policy)
        self._version = version
        self._remove_all_but(target)
        return Publication(version, self._client.model_name, time.monotonic() - began, difference)

    def name_of(self, version: int) -> str:
        """The model's name in requests. Raises ValueError for any version but the last one."""
        if version != self._version:
            raise ValueError(f"version {version} is not served; {self._version} is")
        return self._client.model_name

    @property
    def restarts(self) -> int:
        """Restarts that nobody here asked for."""
        return self._restarts

    def recover(self) -> None:
        """Wait until the server answers; its keeper restarts it with the weights it had.

        Raises:
            ServerLost: it will not come back.
        """
        if self._watch.wait_until_healthy():
            self._restarts += 1

    def close(self) -> None:
        """Nothing to take back: the server ends with the run and needs its folder until then."""

    def _remove_all_but(self, kept: Path | None) -> None:
        for entry in self._folder.iterdir():
            if entry != kept:
                shutil.rmtree(entry)
