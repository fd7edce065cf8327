"""Completions in the training process, for `rollout.use_vllm: false`.

A prompt is a document with one anchor at its end, so the cache and the attention are those of the strided
rollout: every prompt is computed once, then all samples grow by one token a step. A given token (a user's
turn) is fed like one that was drawn. Legend: see `geometry.py`; X samples of a batch, R·N of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ebft_core.attention import PrefixCache, run_backbone
from ebft_core.config import EBFTConfig, RunConfig
from ebft_core.geometry import count_positions, pack_layout
from ebft_core.model_parts import backbone_of, evaluation_mode, head_of, prepare_for_packing
from ebft_core.rows import mix_seed
from ebft_core.samplers.distribution import draw, sampling_logprobs
from ebft_core.samplers.prompts import Conversation, Group, PromptRequest
from ebft_core.samplers.protocol import OnGroup

ROWS = 8
"""Prompts per batch."""

_HEAD_ROWS = 256
"""Positions per call of the head: bounds the logits that exist at once."""


class GenerateSampler:
    """A `Sampler` that runs the policy itself, whatever version is asked for.

    Args:
        policy: as it is trained; run without dropout.
        config: N, temperature and the other sampling parameters.
        stop_token_ids: tokens that end a turn; they belong to it.
        rows: prompts per batch.
    """

    def __init__(
        self, policy: nn.Module, config: RunConfig, stop_token_ids: Sequence[int], *, rows: int = ROWS
    ) -> None:
        self._policy = policy
        self._ebft = config.ebft
        self._stops = frozenset(stop_token_ids)
        self._rows = rows

    def sample(
        self, requests: Sequence[PromptRequest], *, seed: int, version: int, on_group: OnGroup | None = None
    ) -> list[Group]:
        """One group per request, in their order; see `Sampler`.

        Raises:
            UserError: the architecture is not supported, or the model has too few positions.
            FloatingPointError: the logits are not finite.
        """
        groups: dict[int, Group] = {}
        for batch in self._batches(requests):
            with torch.no_grad(), evaluation_mode(self._policy):
                written = _Batch(self._policy, [requests[i] for i in batch], self._ebft, seed).write(
                    self._stops
                )
            for index, conversations in zip(batch, written, strict=True):
                groups[index] = Group(requests[index].row_id, [c.finish() for c in conversations])
                if on_group is not None:
                    on_group(groups[index])
        return [groups[index] for index in range(len(requests))]

    def _batches(self, requests: Sequence[PromptRequest]) -> Iterator[list[int]]:
        """Numbers of requests whose prompts and bounds are about as long."""
        order = sorted(
            range(len(requests)), key=lambda i: (len(requests[i].prompt_ids), requests[i].max_new_tokens)
        )
        for start in range(0, len(order), self._rows):
            yield order[start : start + self._rows]


class _Batch:
    """Prompts whose samples grow together."""

    def __init__(
        self, policy: nn.Module, requests: Sequence[PromptRequest], config: EBFTConfig, seed: int
    ) -> None:
        N, device = config.n_samples_per_prompt, next(policy.parameters()).device
        self._policy, self._config, self._device = policy, config, device
        self._samples = [Conversation(request) for request in requests for _ in range(N)]
        prompts = [torch.tensor(request.prompt_ids) for request in requests]
        self._prompt_RL = nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(device)
        anchors_RA = torch.tensor([[len(request.prompt_ids)] for request in requests], device=device)
        G = max(request.max_new_tokens for request in requests)
        prepare_for_packing(policy, count_positions(self._prompt_RL.shape[1], anchors_RA, G))
        self._layout = pack_layout(anchors_RA, N, G, self._prompt_RL.shape[1])
        self._uniforms_XG = _uniforms(requests, N, G, seed).to(device)

    def write(self, stops: frozenset[int]) -> list[list[Conversation]]:
        """The samples of each prompt, finished."""
        layout, (R, L), N = self._layout, self._prompt_RL.shape, self._layout.n_samples
        backbone, cache = backbone_of(self._policy), PrefixCache(layout)
        position_RNG = layout.position_RT[:, L:].view(R, N, layout.block_length)
        hidden_RLH = run_backbone(backbone, self._prompt_RL, layout.position_RT[:, :L], cache)
        last_R = layout.anchors_RA[:, 0] - 1
        hidden_XH = hidden_RLH[torch.arange(R, device=self._device), last_R].repeat_interleave(N, dim=0)
        seen_XV = self._seen()
        for step in range(layout.block_length):
            self._extend(step, hidden_XH, seen_XV, stops)
            if not any(sample.room for sample in self._samples):
                break
            fed_X = torch.tensor([_token(sample, step) for sample in self._samples], device=self._device)
            if seen_XV is not None:
                seen_XV.scatter_(1, fed_X[:, None], True)
            cache.step = step
            hidden_XH = run_backbone(backbone, fed_X.view(R, N), position_RNG[:, :, step], cache).flatten(
                0, 1
            )
        return [self._samples[start : start + N] for start in range(0, len(self._samples), N)]

    def _extend(self, step: int, hidden_XH: Tensor, seen_XV: Tensor | None, stops: frozenset[int]) -> None:
        """Draw token `step` of the samples that have none there yet."""
        drawn = [x for x, s in enumerate(self._samples) if s.room and len(s.token_ids) == step]
        head = head_of(self._policy)
        for start in range(0, len(drawn), _HEAD_ROWS):
            part = drawn[start : start + _HEAD_ROWS]
            index = torch.tensor(part, device=self._device)
            seen = None if seen_XV is None else seen_XV[index]
            logprob_XV = sampling_logprobs(head(hidden_XH[index]), seen, self._config)
            tokens_X, chosen_X = draw(logprob_XV, self._uniforms_XG[index, step])
            for x, token, logprob in zip(part, tokens_X.tolist(), chosen_X.tolist(), strict=True):
                self._samples[x].write([token], [logprob], ended=token in stops)

    def _seen(self) -> Tensor | None:
        """Which tokens each sample's prompt holds, `(X, V)`; None without a penalty."""
        if self._config.repetition_penalty == 1.0:
            return None
        head: Any = head_of(self._policy)
        seen_XV = torch.zeros(len(self._samples), len(head.weight), dtype=torch.bool, device=self._device)
        for x, sample in enumerate(self._samples):
            seen_XV[x, sample.request.prompt_ids] = True
        return seen_XV


def _token(sample: Conversation, step: int) -> int:
    """Token `step` of a sample; anything behind its end, where nobody looks."""
    return sample.token_ids[step] if step < len(sample.token_ids) else 0


def _uniforms(requests: Sequence[PromptRequest], n_samples: int, length: int, seed: int) -> Tensor:
    """Random numbers `(X, G)` that depend on the seed and the row and on nothing else."""
    rows = torch.zeros(len(requests), n_samples, length)
    for row_NG, request in zip(rows, requests, strict=True):
        generator = torch.Generator().manual_seed(mix_seed(seed, request.row_id))
        drawn_GN = torch.rand(request.max_new_tokens, n_samples, generator=generator)
        row_NG[:, : request.max_new_tokens] = drawn_GN.T
    return rows.flatten(0, 1)
