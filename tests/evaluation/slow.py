"""An evaluation written a second time: float64, one block at a time, plain causal forward passes.

It shares no code with the product: no packing, no chunks, no Gram matrices, no cache.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, dropwhile, takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ebft_core.config import RunConfig


def slow_cross_entropy(
    model: PreTrainedModel, rows: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[float, int]]:
    """Document hash -> (sum of -log p, tokens). Every document is fed alone."""
    sums: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        start = 0
        for length, document in zip(row["document_lengths"], row["document_hashes"], strict=True):
            ids = torch.tensor(row["input_ids"][start : start + length])
            labels = row["labels"][start : start + length]
            start += length
            logprobs = model(ids[None]).logits[0].log_softmax(-1)
            for i in range(1, length):
                if labels[i] != -100:
                    sums[document].append(-float(logprobs[i - 1, labels[i]]))
    return {document: (math.fsum(values), len(values)) for document, values in sums.items()}


def slow_feature(
    model: PreTrainedModel, ids: Tensor, length: int, config: RunConfig, written: Sequence[bool] | None = None
) -> Tensor:
    """φ of the last `length` tokens of `ids`: the last token, the mean, or the mean of the written ones."""
    states = model(ids[None], output_hidden_states=True).hidden_states
    depth = model.config.num_hidden_layers
    layers = []
    for fraction in config.ebft.feature_layers:
        hidden = states[max(1, min(depth, math.floor(fraction * depth)))][0, -length:]
        if config.ebft.embed_method == "completion_mean":
            vector = torch.stack([h for h, on in zip(hidden, written, strict=True) if on]).mean(0)
        else:
            vector = hidden[-1] if config.ebft.embed_method == "last_token" else hidden.mean(0)
        layers.append(vector / vector.norm())
    return torch.cat(layers) / math.sqrt(len(layers))


def slow_block(
    policy: PreTrainedModel,
    base: PreTrainedModel,
    prefix: Tensor,
    target: Tensor,
    uniforms_NG: Tensor,
    config: RunConfig,
) -> dict[str, Any]:
    """Sample N continuations with the given random numbers and score them; `prefix` is their document."""
    samples, entropies = [], []
    for uniforms_G in uniforms_NG:
        ids = prefix
        for uniform in uniforms_G.tolist():
            probabilities = (policy(ids[None]).logits[0, -1] / config.ebft.temperature).softmax(-1)
            entropies.append(-float(sum(p * math.log(p) for p in probabilities.tolist())))
            sums = list(accumulate(probabilities.tolist()))
            token = next(i for i, total in enumerate(sums) if total > uniform)
            ids = torch.cat([ids, torch.tensor([token])])
        samples.append(ids[len(prefix) :])
    G = len(target)
    phi = [slow_feature(base, torch.cat([prefix, sample]), G, config) for sample in samples]
    y = slow_feature(base, torch.cat([prefix, target]), G, config)
    texts = [tuple(sample.tolist()) for sample in samples]
    return {**_scores(phi, y, texts), "entropy": sum(entropies) / len(entropies), "tokens": tuple(texts)}


def _scores(phi: list[Tensor], y: Tensor, texts: list[tuple[int, ...]]) -> dict[str, float]:
    N = len(phi)
    mean = sum(phi) / N
    biased = float(((mean - y) ** 2).sum())
    spread = sum(float(((x - mean) ** 2).sum()) for x in phi) / (N - 1)
    alignments = [float(x @ y) for x in phi]
    return {
        "cfm": biased - spread / N,
        "cfm_biased": biased,
        "alignment": sum(alignments) / N,
        "best_of_n_alignment": max(alignments),
        "diversity": sum(float(phi[i] @ phi[k]) for i in range(N) for k in range(N) if i != k)
        / (N * (N - 1)),
        "duplicate_rate": sum(texts[i] in texts[:i] for i in range(N)) / N,
    }


def slow_completions(
    policy: PreTrainedModel,
    base: PreTrainedModel,
    row: Mapping[str, Any],
    uniforms_NG: Tensor,
    stops: set[int],
    config: RunConfig,
) -> dict[str, Any]:
    """Write N completions of a row's prompt, token by token, and score them against its ground truth."""
    prompt = row["input_ids"][: row["prompt_lengths"][0]]
    truth, on = row["input_ids"][len(prompt) :], row["is_target"][len(prompt) :]
    written = [
        _slow_completion(policy, prompt, list(zip(truth, on, strict=True)), uniforms.tolist(), stops, config)
        for uniforms in uniforms_NG
    ]

    def feature(ids: Sequence[int], mask: Sequence[bool]) -> Tensor:
        return slow_feature(base, torch.tensor([*prompt, *ids]), len(ids), config, mask)

    phi = [feature(tokens, mask) for tokens, mask, _, _ in written]
    entropies = [entropy for sample in written for entropy in sample[2]]
    texts = [tuple(tokens) for tokens, _, _, _ in written]
    return {
        **_scores(phi, feature(truth, on), texts),
        "entropy": sum(entropies) / len(entropies),
        "completion_tokens": sum(sum(mask) for _, mask, _, _ in written) / len(written),
        "truncated_rate": sum(cut for _, _, _, cut in written) / len(written),
        "tokens": tuple(texts),
        "written": tuple(tuple(mask) for _, mask, _, _ in written),
    }


def _slow_completion(
    policy: PreTrainedModel,
    prompt: list[int],
    truth: list[tuple[int, bool]],
    uniforms: list[float],
    stops: set[int],
    config: RunConfig,
) -> tuple[list[int], list[bool], list[float], bool]:
    """Tokens, which of them the policy wrote, the entropies of those, and whether the bound cut it."""
    tokens: list[int] = []
    mask: list[bool] = []
    entropies: list[float] = []
    behind = truth
    while True:
        if len(tokens) == config.ebft.max_completion_length:
            return tokens, mask, entropies, True
        logits = policy(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
        probabilities = (logits / config.ebft.temperature).softmax(-1).tolist()
        entropies.append(-math.fsum(p * math.log(p) for p in probabilities if p > 0))
        sums = accumulate(probabilities)
        token = next(i for i, total in enumerate(sums) if total > uniforms[len(tokens)])
        tokens.append(token)
        mask.append(True)
        if token not in stops:
            continue
        behind = list(dropwhile(lambda pair: pair[1], behind))  # the truth's own turn
        given = [token for token, _ in takewhile(lambda pair: not pair[1], behind)]
        behind = behind[len(given) :]
        if not behind:
            return tokens, mask, entropies, False
        if len(tokens) + len(given) >= config.ebft.max_completion_length:
            return tokens, mask, entropies, True
        tokens += given
        mask += [False] * len(given)
