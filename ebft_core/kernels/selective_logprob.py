"""Log-probabilities of chosen tokens straight from hidden states and the head's weight.

With z_xv = (h_x · w_v + b_v) / τ and lse_x = log Σ_v exp z_xv:

    logprob_xn = z_x,token(x,n) - lse_x
    entropy_x  = lse_x - Σ_v softmax(z_x)_v z_xv                            (no gradient)
    ∂L/∂z_xv   = Σ_n g_xn · (1[v = token(x,n)] - softmax(z_x)_v)            for upstream g = ∂L/∂logprob
    ∂L/∂h_x    = 1/τ Σ_v ∂L/∂z_xv · w_v;   ∂L/∂w_v = 1/τ Σ_x ∂L/∂z_xv · h_x;   ∂L/∂b_v = 1/τ Σ_x ∂L/∂z_xv

Forward: the vocabulary is walked in tiles with a running maximum and sum, so no logits reach memory, and they
are never rounded to bfloat16 (the head module rounds them: at a logit of 20 by up to 0.06). Backward: the
vocabulary is cut into chunks of at most `CHUNK_ELEMENTS` entries of ∂L/∂z; a kernel recomputes the chunk's
logits and writes ∂L/∂z, then two library matrix products use it. A chunk holds *all* rows, so every row of
∂L/∂w is written exactly once: no atomics, no races, the same bits in every run, and no float32 copy of
the weight's gradient. ∂L/∂h is summed over chunks in float32.

Why not a library. Liger's fused linear cross-entropy takes one target per hidden state (ours share a
state among the N samples of an anchor), keeps the logits of a chunk of rows in the model's dtype, reads the
number of targets back to the host in each call, and sums the weight's gradient over row chunks, by
default in the model's dtype. Cut cross-entropy takes one target as well, adds tiles of both gradients under
locks (in an order that varies between runs), by default skips tiles below a threshold, and refuses
float32 in its backward pass. Neither returns the entropy. `benchmarks/kernels.py` times all of them where
they are installed.

Legend: see `geometry.py`; X hidden states, N tokens scored per state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from ebft_core.kernels.dispatch import HALF_DTYPES, KernelBackend, use_kernel

REFERENCE_ROWS = 1024
"""Hidden states per chunk of the reference: bounds the logits that exist at once."""

CHUNK_ELEMENTS = 2**27
"""Entries of ∂L/∂z that exist at once in the kernel's backward pass: 256 MB in bfloat16."""


def selective_logprob(
    hidden_XH: Tensor,
    weight_VH: Tensor,
    tokens_XN: Tensor,
    temperature: float,
    bias_V: Tensor | None = None,
    *,
    backend: KernelBackend = "auto",
) -> tuple[Tensor, Tensor]:
    """Log-probabilities at temperature τ of N tokens per hidden state, and entropies.

    Under autocast the operands are rounded to autocast's dtype, as the head module would do it.

    Args:
        hidden_XH, weight_VH: of one floating dtype (or of any, under autocast).
        tokens_XN: int64 token ids in [0, V).
        bias_V: the head's bias, if it has one.
        backend: kernel or reference; `auto` takes the kernel on CUDA in half precision.

    Returns:
        `logprob_XN` float32, differentiable in hidden states, weight and bias (what is frozen is skipped),
        and `entropy_X1` float32 in nats, without gradient.

    Raises:
        ValueError: temperature is not positive, or shapes do not fit.

    Example:
        >>> hidden_XH, weight_VH = torch.randn(3, 8), torch.randn(11, 8)
        >>> tokens_XN = torch.tensor([[1], [2], [3]])
        >>> logprob_XN, entropy_X1 = selective_logprob(hidden_XH, weight_VH, tokens_XN, 0.6)
        >>> logprob_XN.shape, entropy_X1.shape
        (torch.Size([3, 1]), torch.Size([3, 1]))
    """
    _check(hidden_XH, weight_VH, tokens_XN, temperature)
    device = hidden_XH.device
    dtype = torch.get_autocast_dtype(device.type) if _autocast(device) else hidden_XH.dtype
    if hidden_XH.shape[0] == 0:
        empty = hidden_XH.new_zeros(0, tokens_XN.shape[1], dtype=torch.float32)
        return empty, hidden_XH.new_zeros(0, 1, dtype=torch.float32)
    # float32 in full precision is bound by arithmetic, and there the library's product is the faster one.
    if use_kernel(backend, device, dtype, HALF_DTYPES):
        logprob_XN, entropy_X1 = _Kernel.apply(
            hidden_XH.to(dtype), weight_VH, tokens_XN, temperature, bias_V, dtype
        )
        return logprob_XN, entropy_X1
    return reference(hidden_XH, weight_VH, tokens_XN, temperature, bias_V)


def reference(
    hidden_XH: Tensor,
    weight_VH: Tensor,
    tokens_XN: Tensor,
    temperature: float,
    bias_V: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same in plain torch: chunks of rows, recomputed in the backward pass where there are several."""
    chunks = []
    for start in range(0, hidden_XH.shape[0], REFERENCE_ROWS):
        part = slice(start, start + REFERENCE_ROWS)
        operands = (hidden_XH[part], weight_VH, tokens_XN[part], temperature, bias_V)
        chunks.append(
            checkpoint(_score, *operands, use_reentrant=False)
            if torch.is_grad_enabled() and hidden_XH.shape[0] > REFERENCE_ROWS
            else _score(*operands)
        )
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def plain_head(head: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Weight `(V, H)` and bias of a head that `selective_logprob` may replace; None for any other.

    A head with an adapter, with hooks or with a sharded weight must be called as a module.
    """
    hooked = type(head) is nn.Linear and (head._forward_hooks or head._forward_pre_hooks)
    if type(head) is not nn.Linear or hooked or type(head.weight) not in (nn.Parameter, Tensor):
        return None
    return head.weight, head.bias


def _score(
    hidden_XH: Tensor, weight_VH: Tensor, tokens_XN: Tensor, temperature: float, bias_V: Tensor | None
) -> tuple[Tensor, Tensor]:
    return score_logits(nn.functional.linear(hidden_XH, weight_VH, bias_V), tokens_XN, temperature)


def score_logits(logits_XV: Tensor, tokens_XN: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """`selective_logprob` from logits that exist already."""
    kept = logits_XV if logits_XV.dtype == torch.float64 else logits_XV.float()
    logprob_XN, entropy_X1 = _ScoreLogits.apply(kept, tokens_XN, temperature)
    return logprob_XN, entropy_X1


class _ScoreLogits(torch.autograd.Function):
    """Scores from one softmax, which is also all that the backward pass needs.

    lse = max z - log max p: the largest probability is never below 1/V, so nothing underflows.
    """

    @staticmethod
    def forward(ctx: Any, logits_XV: Tensor, tokens_XN: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        scaled_XV = logits_XV if temperature == 1 else logits_XV / temperature
        probs_XV = scaled_XV.softmax(dim=-1)
        highest_X1, where_X1 = scaled_XV.max(dim=-1, keepdim=True)
        lse_X1 = highest_X1 - probs_XV.gather(-1, where_X1).log()
        with torch.autocast(logits_XV.device.type, enabled=False):  # it would round both to half precision
            mean_X1 = torch.bmm(probs_XV[:, None], scaled_XV[:, :, None])[:, 0]
        entropy_X1 = (lse_X1 - mean_X1).float()
        ctx.save_for_backward(probs_XV, tokens_XN)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy_X1)
        return (scaled_XV.gather(-1, tokens_XN) - lse_X1).float(), entropy_X1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_XN: Tensor, _entropy: Tensor | None) -> tuple[Tensor, None, None]:
        probs_XV, tokens_XN = ctx.saved_tensors
        scaled_XN = grad_XN.to(probs_XV.dtype) / ctx.temperature
        d_logits_XV = probs_XV * -scaled_XN.sum(dim=-1, keepdim=True)
        return d_logits_XV.scatter_add_(-1, tokens_XN, scaled_XN), None, None


class _Kernel(torch.autograd.Function):
    """Autograd around the two kernels; `hidden_XH` is already in the dtype to compute in."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_XH: Tensor,
        weight_VH: Tensor,
        tokens_XN: Tensor,
        temperature: float,
        bias_V: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        from ebft_core.kernels import selective_logprob_triton as kernels

        hidden_XH, tokens_XN = hidden_XH.contiguous(), tokens_XN.contiguous()
        picked_XN, lse_XS, mean_XS = kernels.forward(
            hidden_XH, weight_VH.to(dtype), tokens_XN, temperature, bias_V
        )
        lse_X1 = lse_XS.logsumexp(dim=-1, keepdim=True)
        entropy_X1 = lse_X1 - ((lse_XS - lse_X1).exp() * mean_XS).sum(dim=-1, keepdim=True)
        ctx.save_for_backward(hidden_XH, weight_VH, tokens_XN, bias_V, lse_X1)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy_X1)
        return picked_XN - lse_X1, entropy_X1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_XN: Tensor, _entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_XH, weight_VH, tokens_XN, bias_V, lse_X1 = ctx.saved_tensors
        wants_hidden, wants_weight, _, _, wants_bias, _ = ctx.needs_input_grad
        X, H = hidden_XH.shape
        # Losses are means over many tokens: unscaled, float16 would lose all but the chosen tokens.
        size = grad_XN.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
        scale = size / ctx.temperature
        d_hidden = hidden_XH.new_zeros(X, H, dtype=torch.float32) if wants_hidden else None
        d_weight = torch.empty_like(weight_VH) if wants_weight else None
        d_bias = torch.empty_like(bias_V) if wants_bias else None
        with torch.autocast(hidden_XH.device.type, enabled=False):
            saved = (hidden_XH, weight_VH, tokens_XN, bias_V, lse_X1)
            for part, weight_CH, d_logits_XC in _chunks(*saved, grad_XN / size, ctx.temperature):
                if d_hidden is not None:
                    d_hidden += _product(d_logits_XC, weight_CH)
                if d_weight is not None:
                    d_weight[part] = _product(d_logits_XC.T, hidden_XH) * scale
                if d_bias is not None:
                    d_bias[part] = d_logits_XC.sum(dim=0, dtype=torch.float32) * scale
        d_hidden = None if d_hidden is None else (d_hidden * scale).to(hidden_XH.dtype)
        return d_hidden, d_weight, None, None, d_bias, None


def _chunks(
    hidden_XH: Tensor,
    weight_VH: Tensor,
    tokens_XN: Tensor,
    bias_V: Tensor | None,
    lse_X1: Tensor,
    grad_XN: Tensor,
    temperature: float,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Chunks C of the vocabulary: where, the weight's rows in the dtype to compute in, τ · ∂L/∂z."""
    from ebft_core.kernels import selective_logprob_triton as kernels

    V, grad_XN = weight_VH.shape[0], grad_XN.contiguous()
    step = max(CHUNK_ELEMENTS // len(hidden_XH) // kernels.CHUNK_ALIGN, 1) * kernels.CHUNK_ALIGN
    buffer = hidden_XH.new_empty(len(hidden_XH) * min(step, V))  # one for all chunks: the loop keeps the last
    for start in range(0, V, step):
        part = slice(start, min(start + step, V))
        weight_CH = weight_VH[part].to(hidden_XH.dtype).contiguous()
        bias_C = None if bias_V is None else bias_V[part].contiguous()
        d_logits_XC = buffer[: len(hidden_XH) * len(weight_CH)].view(len(hidden_XH), -1)
        operands = (hidden_XH, weight_CH, tokens_XN - start, temperature, bias_C, lse_X1, grad_XN)
        kernels.logit_gradient(*operands, out_XC=d_logits_XC)
        yield part, weight_CH, d_logits_XC


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product with a float32 result; half-precision operands are not rounded on the way."""
    if left.dtype == torch.float32:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _autocast(device: torch.device) -> bool:
    return torch.is_autocast_enabled(device.type)


def _check(hidden_XH: Tensor, weight_VH: Tensor, tokens_XN: Tensor, temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"log-probabilities need temperature > 0, got {temperature}")
    if hidden_XH.shape[1] != weight_VH.shape[1] or tokens_XN.shape[0] != hidden_XH.shape[0]:
        raise ValueError(
            "hidden_XH, weight_VH and tokens_XN do not fit: "
            f"{tuple(hidden_XH.shape)}, {tuple(weight_VH.shape)}, {tuple(tokens_XN.shape)}"
        )
    if not _autocast(hidden_XH.device) and hidden_XH.dtype != weight_VH.dtype:
        raise ValueError(f"hidden states are {hidden_XH.dtype}, the head's weight is {weight_VH.dtype}")
