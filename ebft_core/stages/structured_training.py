"""What training on whole completions needs beside a policy: rows in order, a sampler, a server's client."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ebft_core.attention import Backend
from ebft_core.config import RunConfig
from ebft_core.data.stop_tokens import read_stop_token_ids
from ebft_core.errors import UserError
from ebft_core.own_rewards import OwnRewards
from ebft_core.samplers.generate import GenerateSampler
from ebft_core.samplers.protocol import Sampler
from ebft_core.samplers.vllm import VLLMSampler, connect
from ebft_core.stage_runner import Preempted, StageContext
from ebft_core.stop import Interrupted
from ebft_core.trainers.own import OwnScorer
from ebft_core.vllm.client import VLLMClient
from ebft_core.vllm.model_sync import ModelPublisher
from ebft_core.vllm.state import ServerState, read_state, server_folder
from ebft_core.vllm.sync import AdapterPublisher, Publisher

CANARY_TOKENS = 64
"""Length of the text that the server continues after every sync, for the trainer to check."""


@dataclass(frozen=True)
class Generation:
    """Who writes the completions, and who brings the weights there."""

    sampler: Sampler
    publisher: Publisher | None


@contextlib.contextmanager
def generation(
    context: StageContext, policy: nn.Module, tokenizer: Any, canary_ids: Sequence[int], attention: Backend
) -> Iterator[Generation]:
    """The run's sampler; what was published is taken back at the end.

    Raises:
        UserError: the run has no server, or it cannot be given the policy's weights.
        Preempted: asked to stop while waiting for the server.
    """
    config = context.config
    stops = read_stop_token_ids(context.inputs["tokenize"])
    if not config.rollout.use_vllm:
        yield Generation(GenerateSampler(policy, config, stops), None)
        return
    state = _server(server_folder(context.run_dir))
    with contextlib.closing(connect(state.url, state.model_name, config)) as client:
        try:
            with context.stop.interruptible():  # a server that is being restarted is waited for
                publisher = _publisher(context, client, policy, tokenizer, canary_ids, attention)
        except Interrupted:
            raise Preempted("while the vLLM server was waited for") from None
        with contextlib.closing(publisher):
            yield Generation(VLLMSampler(client, config, stops, publisher), publisher)


def _publisher(
    context: StageContext,
    client: VLLMClient,
    policy: nn.Module,
    tokenizer: Any,
    canary_ids: Sequence[int],
    attention: Backend,
) -> Publisher:
    """Adapters, or whole models where there are none."""
    # The server writes logs about adapters it cannot find: their folder must outlive neither run nor work.
    published = context.work / "published"
    canary = list(canary_ids[:CANARY_TOKENS])
    around: dict[str, Any] = {"server_folder": server_folder(context.run_dir), "attention": attention}
    if context.config.lora is not None:
        return AdapterPublisher(client, published, policy, canary, context.config, **around)
    return ModelPublisher(client, published, policy, tokenizer, canary, context.config, **around)


def own_scorer(config: RunConfig, tokenizer: Any) -> OwnScorer | None:
    """Section `rewards`; None where there is none.

    Raises:
        UserError: a function cannot be imported or called.
    """
    return OwnScorer(OwnRewards(config.rewards), tokenizer) if config.rewards else None


def _server(folder: Path) -> ServerState:
    state = read_state(folder)
    if state is None or state.phase in ("stopped", "failed"):
        raise UserError(
            "the run has no vLLM server",
            where="rollout.use_vllm",
            value=None if state is None else f"{state.phase} {state.error or ''}".strip(),
            expected="a server that was started for this run",
            hint="start the run with `ebft run`; for this stage alone, keep one with "
            f"`python -m ebft_core.cli serve-vllm --run-dir {folder.parent}`",
        )
    return state
