"""An evaluation written a second time: float64, one block at a time, plain causal forward passes.

It shares no code with the product: no packing, no chunks, no Gram matrices, no cache.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
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


def slow_feature(model: PreTrainedModel, ids: Tensor, length: int, config: RunConfig) -> Tensor:
    """φ of the last `length` tokens of `ids`, pooled by the last token or the mean."""
    states = model(ids[None], output_hidden_states=True).hidden_states
    depth = model.config.num_hidden_layers
    layers = []
    for fraction in config.ebft.feature_layers:
        hidden = states[max(1, min(depth, math.floor(fraction * depth)))][0, -length:]
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
    G, N = len(target), len(samples)
    phi = [slow_feature(base, torch.cat([prefix, sample]), G, config) for sample in samples]
    y = slow_feature(base, torch.cat([prefix, target]), G, config)
    mean = sum(phi) / N
    biased = float(((mean - y) ** 2).sum())
    spread = sum(float(((x - mean) ** 2).sum()) for x in phi) / (N - 1)
    alignments = [float(x @ y) for x in phi]
    texts = [tuple(sample.tolist()) for sample in samples]
    return {
        "cfm": biased - spread / N,
        "cfm_biased": biased,
        "alignment": sum(alignments) / N,
        "best_of_n_alignment": max(alignments),
        "diversity": sum(float(phi[i] @ phi[k]) for i in range(N) for k in range(N) if i != k)
        / (N * (N - 1)),
        "duplicate_rate": sum(texts[i] in texts[:i] for i in range(N)) / N,
        "entropy": sum(entropies) / len(entropies),
        "tokens": tuple(texts),
    }
