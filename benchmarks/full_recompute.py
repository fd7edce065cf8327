"""The baseline: the same algorithm written plainly, without prefix sharing.

Every sample has its own copy of the document, every generated token costs a full forward pass over
everything so far, the mask is one dense T × T tensor, the head runs on all positions and feature
whitening builds D × D matrices. It is vectorised and runs on the library's own SDPA, so it is what a
careful person writes first, not a straw man; `tests/test_benchmarks.py` holds it to the same results as
the product. Tokens stand step-major behind the document: token (s, b) of a copy at L + s·A + b.
Legend: see `ebft_core/geometry.py`; C = R·N copies.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from ebft_core.bench.measure import PhaseTimes, uniforms_for
from ebft_core.config import EBFTConfig
from ebft_core.features import layer_indices
from ebft_core.rows import RowBatch


def step_major_mask(anchors_CA: Tensor, length: int, steps: int) -> Tensor:
    """Dense mask `(C, 1, T, T)`, T = length + steps·A: causal documents; blocks see prefix and themselves."""
    C, A = anchors_CA.shape
    T = length + steps * A
    index = torch.arange(T, device=anchors_CA.device)
    document = index < length
    block = (index - length) % A
    step = (index - length) // A
    causal = document[:, None] & document[None, :] & (index[None, :] <= index[:, None])
    own = ~document[:, None] & ~document[None, :] & (block[:, None] == block[None, :])
    own &= step[None, :] <= step[:, None]
    nothing = anchors_CA.new_zeros(C, length)
    bound_CT = torch.cat([nothing, anchors_CA.repeat(1, steps)], dim=1)
    prefix = document[None, None, :] & (index[None, None, :] < bound_CT[:, :, None])
    return ((causal | own)[None] | prefix)[:, None]


def _positions(anchors_CA: Tensor, length: int, steps: int) -> Tensor:
    C = anchors_CA.shape[0]
    generated = [anchors_CA + s for s in range(steps)]
    document = torch.arange(length, device=anchors_CA.device).expand(C, length)
    return torch.cat([document, *generated], dim=1)


def _logits(model: nn.Module, ids_CT: Tensor, anchors_CA: Tensor, length: int, steps: int) -> Tensor:
    return model(
        input_ids=ids_CT,
        attention_mask=step_major_mask(anchors_CA, length, steps),
        position_ids=_positions(anchors_CA, length, steps),
        use_cache=False,
    ).logits


def _predictors(anchors_CA: Tensor, length: int, step: int) -> Tensor:
    """Packed index of the predictor of step `step`: the anchor's predecessor, then the block's last token."""
    A = anchors_CA.shape[1]
    blocks = torch.arange(A, device=anchors_CA.device).expand_as(anchors_CA)
    return anchors_CA - 1 if step == 0 else length + (step - 1) * A + blocks


@torch.no_grad()
def plain_rollout(
    model: nn.Module, input_ids_RL: Tensor, anchors_RA: Tensor, uniforms_RANG: Tensor, temperature: float
) -> Tensor:
    """`tokens_RANG`, one full forward over N copies for every generated token."""
    R, A, N, G = uniforms_RANG.shape
    L = input_ids_RL.shape[1]
    ids_CT, anchors_CA = _copies(input_ids_RL, N), _copies(anchors_RA, N)
    uniforms_CAG = uniforms_RANG.permute(0, 2, 1, 3).reshape(R * N, A, G)
    for step in range(G):
        logits_CTV = _logits(model, ids_CT, anchors_CA, L, step)
        where = _predictors(anchors_CA, L, step)[..., None].expand(-1, -1, logits_CTV.shape[-1])
        cdf = (logits_CTV.gather(1, where) / temperature).softmax(-1).cumsum(-1)
        thresholds = (uniforms_CAG[:, :, step, None] * cdf[..., -1:]).contiguous()
        drawn = torch.searchsorted(cdf, thresholds, right=True)
        ids_CT = torch.cat([ids_CT, drawn[..., 0]], dim=1)
    return ids_CT[:, L:].view(R, N, G, A).permute(0, 3, 1, 2)


@torch.no_grad()
def plain_features(
    model: nn.Module, input_ids_RL: Tensor, anchors_RA: Tensor, tokens_RANG: Tensor, layers: list[int]
) -> tuple[Tensor, Tensor]:
    """Last-token features `phi_RAND` and `target_RAD` from a complete forward over N copies."""
    R, A, N, G = tokens_RANG.shape
    L = input_ids_RL.shape[1]
    anchors_CA = _copies(anchors_RA, N)
    output = model(
        input_ids=_pack(input_ids_RL, tokens_RANG),
        attention_mask=step_major_mask(anchors_CA, L, G),
        position_ids=_positions(anchors_CA, L, G),
        use_cache=False,
        output_hidden_states=True,
    )
    states = [output.hidden_states[layer] for layer in layers]
    phi = [s[:, L + (G - 1) * A :].view(R, N, A, -1).transpose(1, 2) for s in states]
    last_RA = anchors_RA + G - 1
    target = [s[::N].gather(1, last_RA[..., None].expand(-1, -1, s.shape[-1])) for s in states]
    return _unit(phi), _unit(target)


def plain_rewards(phi_RAND: Tensor, target_RAD: Tensor, tolerance: float = 1e-5) -> tuple[Tensor, Tensor]:
    """Feature-whitened rewards and RLOO advantages `_RAN`, block by block with D × D matrices."""
    R, A, N, _ = phi_RAND.shape
    alignment, similarity = (torch.zeros(R, A, N, device=phi_RAND.device) for _ in range(2))
    for r in range(R):
        for b in range(A):
            X_ND = phi_RAND[r, b].float()
            values, vectors = torch.linalg.eigh(X_ND.T @ X_ND)
            kept = values > max(tolerance**2, 1e-6) * values[-1]
            root = (vectors * torch.where(kept, values.clamp(min=1e-30).rsqrt(), 0.0)) @ vectors.T
            white, y = X_ND @ root, root @ target_RAD[r, b].float()
            alignment[r, b] = torch.nn.functional.cosine_similarity(white, y[None], dim=-1)
            gram = white @ white.T
            similarity[r, b] = (gram.sum(-1) - gram.diagonal()) / (N - 1)
    a, d = 2 * alignment, 2 * similarity
    baseline = (a.sum(-1, keepdim=True) - a) / (N - 1) - (d.sum(-1, keepdim=True) - 2 * d) / (N - 2)
    return a - d, a - d - baseline


def plain_logprobs(
    model: nn.Module, input_ids_RL: Tensor, anchors_RA: Tensor, tokens_RANG: Tensor, temperature: float
) -> Tensor:
    """`logprob_RANG`, differentiable, from logits at every position of N copies."""
    R, A, N, G = tokens_RANG.shape
    L = input_ids_RL.shape[1]
    anchors_CA = _copies(anchors_RA, N)
    logits_CTV = _logits(model, _pack(input_ids_RL, tokens_RANG), anchors_CA, L, G)
    logprob_CTV = (logits_CTV / temperature).log_softmax(-1)
    steps = []
    for step in range(G):
        where = _predictors(anchors_CA, L, step)
        tokens_CA = tokens_RANG[..., step].transpose(1, 2).reshape(R * N, A)
        rows = torch.arange(R * N, device=tokens_CA.device)[:, None]
        steps.append(logprob_CTV[rows, where, tokens_CA])
    return torch.stack(steps, dim=-1).view(R, N, A, G).transpose(1, 2)


def plain_loss(advantage_RAN: Tensor, logprob_RANG: Tensor) -> Tensor:
    """REINFORCE loss over all action tokens."""
    return -(advantage_RAN[..., None] * logprob_RANG).sum() / logprob_RANG.numel()


def timed_plain_step(
    policy: nn.Module, feature_model: nn.Module, batch: RowBatch, config: EBFTConfig
) -> PhaseTimes:
    """One step of the baseline, timed as `ebft_core.bench.measure.timed_step` times the product."""
    uniforms = uniforms_for(batch, config).to(batch.input_ids_RL.device)
    layers = layer_indices(config.feature_layers, policy.config.num_hidden_layers)
    policy.zero_grad(set_to_none=True)
    start = time.perf_counter()
    tokens = plain_rollout(policy, batch.input_ids_RL, batch.anchors_RA, uniforms, config.temperature)
    rolled_out = time.perf_counter()
    phi, target = plain_features(feature_model, batch.input_ids_RL, batch.anchors_RA, tokens, layers)
    _, advantage = plain_rewards(phi, target)
    featured = time.perf_counter()
    logprob = plain_logprobs(policy, batch.input_ids_RL, batch.anchors_RA, tokens, config.temperature)
    plain_loss(advantage, logprob).backward()
    return PhaseTimes(rolled_out - start, featured - rolled_out, time.perf_counter() - featured)


def _copies(tensor_RX: Tensor, n_samples: int) -> Tensor:
    return tensor_RX.repeat_interleave(n_samples, dim=0)


def _pack(input_ids_RL: Tensor, tokens_RANG: Tensor) -> Tensor:
    R, A, N, G = tokens_RANG.shape
    generated = tokens_RANG.permute(0, 2, 3, 1).reshape(R * N, G * A)
    return torch.cat([_copies(input_ids_RL, N), generated], dim=1)


def _unit(layers: list[Tensor]) -> Tensor:
    return (
        torch.cat([torch.nn.functional.normalize(x.float(), dim=-1) for x in layers], -1) / len(layers) ** 0.5
    )
