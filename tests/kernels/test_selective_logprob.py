"""`selective_logprob`: the kernel and the reference against log-softmax and autograd in float64.

Operands are rounded to their dtype first, so what is compared is arithmetic: sums in float32, and
gradients that are rounded to the operands' dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import ebft_core.kernels.selective_logprob as operation
from ebft_core.kernels.selective_logprob import plain_head, score_logits, selective_logprob
from tests.oracles.tiny_models import tiny_model

from .conftest import INTERPRETED

TAU = 0.6
GRADIENT = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 2e-3}
"""Relative error of a gradient (Frobenius norms), by dtype of the operands."""

SHAPES = [(1, 1, 1, 1), (5, 3, 33, 2), (37, 203, 40, 3), (64, 128, 64, 1), (33, 65, 31, 9)]
"""X, V, H, N: below, at and just beyond the tiles of the kernel."""


class Case(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    tokens: Tensor
    upstream: Tensor


class Result(NamedTuple):
    logprob: Tensor
    entropy: Tensor
    gradients: list[Tensor]


def _case(shape: tuple[int, int, int, int], dtype: torch.dtype, *, bias: bool, seed: int = 0) -> Case:
    X, V, H, N = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    hidden, weight = normal(X, H).to(dtype), (normal(V, H) * 2 / H**0.5).to(dtype)
    tokens = torch.randint(0, V, (X, N), generator=generator)
    if N > 1:
        tokens[0, 1] = tokens[0, 0]  # two samples that drew the same token
    return Case(hidden, weight, normal(V).to(dtype) if bias else None, tokens, normal(X, N))


def _exact(case: Case) -> Result:
    """float64, all logits at once, autograd."""
    operands = [t.to(torch.float64, copy=True).requires_grad_() for t in (case.hidden, case.weight)]
    bias = None if case.bias is None else case.bias.double().requires_grad_()
    logprob_XV = (nn.functional.linear(*operands, bias) / TAU).log_softmax(-1)
    logprob = torch.stack([logprob_XV[x, tokens] for x, tokens in enumerate(case.tokens)])
    (logprob * case.upstream).sum().backward()
    entropy = -(logprob_XV.exp() * logprob_XV).sum(-1, keepdim=True)
    leaves = [*operands, *([] if bias is None else [bias])]
    return Result(logprob.detach(), entropy.detach(), [leaf.grad for leaf in leaves])


def _run(case: Case, backend: str, device: torch.device) -> Result:
    hidden, weight = (t.to(device, copy=True).requires_grad_() for t in (case.hidden, case.weight))
    bias = None if case.bias is None else case.bias.to(device, copy=True).requires_grad_()
    logprob, entropy = selective_logprob(hidden, weight, case.tokens.to(device), TAU, bias, backend=backend)
    assert logprob.dtype == entropy.dtype == torch.float32
    assert not entropy.requires_grad
    (logprob * case.upstream.to(device)).sum().backward()
    leaves = [hidden, weight, *([] if bias is None else [bias])]
    assert all(leaf.grad.dtype == leaf.dtype for leaf in leaves)
    return Result(logprob.detach().cpu(), entropy.cpu(), [leaf.grad.cpu() for leaf in leaves])


def _relative(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def _assert_close(actual: Result, exact: Result, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.logprob.double(), exact.logprob, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(actual.entropy.double(), exact.entropy, atol=2e-5, rtol=1e-5)
    assert len(actual.gradients) == len(exact.gradients)
    for got, want in zip(actual.gradients, exact.gradients, strict=True):
        if want.norm() > 1e-9:  # one token of one: the gradient is zero
            assert _relative(got, want) < GRADIENT[dtype]
        else:
            assert got.abs().max() < 1e-6


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", list(GRADIENT))
def test_kernel(
    dtype: torch.dtype, shape: tuple[int, int, int, int], bias: bool, device: torch.device
) -> None:
    case = _case(shape, dtype, bias=bias)
    _assert_close(_run(case, "triton", device), _exact(case), dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_reference(shape: tuple[int, int, int, int], bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation, "REFERENCE_ROWS", 16)
    case = _case(shape, torch.float32, bias=bias)
    _assert_close(_run(case, "torch", torch.device("cpu")), _exact(case), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_tiles_on_cuda(dtype: torch.dtype) -> None:
    """Many tiles in every direction and several chunks, with sides that no tile divides."""
    case = _case((1031, 5003, 520, 4), dtype, bias=False)
    _assert_close(_run(case, "triton", torch.device("cuda")), _exact(case), dtype)


@pytest.mark.gpu
def test_no_logits_on_cuda() -> None:
    """Peak memory stays below one (X, V) tensor of half precision, forward and backward."""
    X, V, H = 4096, 65_536, 256
    hidden = torch.randn(X, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(V, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.randint(0, V, (X, 1), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprob, _ = selective_logprob(hidden, weight, tokens, 1.0, backend="triton")
    assert torch.cuda.max_memory_allocated() - before < X * V * 2 / 16
    logprob.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < X * V * 2


def test_chunks_of_the_vocabulary_join(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Three chunks in the backward pass, each with its own part of the tokens."""
    case = _case((9, 700, 24, 2), torch.float32, bias=True)
    assert {int(token) // 256 for token in case.tokens.flatten()} == {0, 1, 2}
    monkeypatch.setattr(operation, "CHUNK_ELEMENTS", 1)
    _assert_close(_run(case, "triton", device), _exact(case), torch.float32)


@pytest.mark.parametrize("trains", ["hidden", "weight"])
def test_frozen_operands_get_no_gradient(trains: str, device: torch.device) -> None:
    case = _case((7, 50, 16, 2), torch.float32, bias=False)
    hidden = case.hidden.to(device, copy=True).requires_grad_(trains == "hidden")
    weight = case.weight.to(device, copy=True).requires_grad_(trains == "weight")
    logprob, _ = selective_logprob(hidden, weight, case.tokens.to(device), TAU, backend="triton")
    (logprob * case.upstream.to(device)).sum().backward()
    trained, frozen = (hidden, weight) if trains == "hidden" else (weight, hidden)
    assert frozen.grad is None
    exact = _exact(case).gradients[0 if trains == "hidden" else 1]
    assert _relative(trained.grad.cpu(), exact) < GRADIENT[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 1e-7])
def test_autocast_rounds_operands_only(dtype: torch.dtype, size: float, device: torch.device) -> None:
    """float32 master weights: their gradients stay float32, however small a loss's share of a token is."""
    case = _case((21, 90, 32, 2), torch.float32, bias=True)
    rounded = case._replace(hidden=case.hidden.to(dtype), weight=case.weight.to(dtype))
    exact = _exact(rounded._replace(upstream=case.upstream * size))
    with torch.autocast(device.type, dtype):
        actual = _run(case._replace(upstream=case.upstream * size), "triton", device)
    torch.testing.assert_close(actual.logprob.double(), exact.logprob, atol=2e-5, rtol=1e-5)
    # float16 hidden states get a float16 gradient on the way to float32, where 1e-7 is no longer exact.
    first = 1 if dtype == torch.float16 and size < 1 else 0
    for got, want in zip(actual.gradients[first:], exact.gradients[first:], strict=True):
        assert _relative(got, want) < GRADIENT[dtype]


def test_scores_of_logits_are_not_rounded_by_autocast() -> None:
    """A head that is called as a module hands over logits; what follows is float32 under autocast too."""
    case = _case((21, 90, 32, 2), torch.float32, bias=False)
    logits = (case.hidden @ case.weight.T).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        logprob, entropy = score_logits(logits, case.tokens, TAU)
    exact_XV = (logits.double() / TAU).log_softmax(-1)
    exact = -(exact_XV.exp() * exact_XV).sum(-1, keepdim=True)
    torch.testing.assert_close(entropy.double(), exact, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(logprob.double(), exact_XV.gather(-1, case.tokens), atol=2e-5, rtol=1e-5)


def test_agrees_with_the_head_module(device: torch.device) -> None:
    """In the place of a head with a bias: values and the gradients of its parameters."""
    case = _case((19, 77, 24, 4), torch.float32, bias=True)
    head = nn.Linear(24, 77)
    with torch.no_grad():
        head.weight.copy_(case.weight)
        head.bias.copy_(case.bias)
    hidden = case.hidden.clone().requires_grad_()
    logprob = (head(hidden) / TAU).log_softmax(-1).gather(-1, case.tokens)
    (logprob * case.upstream).sum().backward()
    actual = _run(case, "triton", device)
    torch.testing.assert_close(actual.logprob, logprob.detach(), atol=1e-5, rtol=1e-5)
    for got, want in zip(actual.gradients, [hidden.grad, head.weight.grad, head.bias.grad], strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_large_logits(backend: str, device: torch.device) -> None:
    """Logits of ±10⁴: probabilities of 0 and 1, nothing overflows."""
    hidden = torch.tensor([[100.0, 0.0], [0.0, -100.0]], device=device, requires_grad=True)
    weight = torch.tensor([[60.0, 0.0], [0.0, 60.0], [-60.0, -60.0]], device=device)
    tokens = torch.tensor([[0, 1], [2, 1]], device=device)
    logprob, entropy = selective_logprob(hidden, weight, tokens, 1.0, backend=backend)
    logprob.sum().backward()
    torch.testing.assert_close(logprob.detach().cpu(), torch.tensor([[0.0, -6e3], [0.0, -12e3]]))
    assert entropy.abs().max() < 1e-3
    assert hidden.grad.isfinite().all()


@INTERPRETED
def test_auto_on_a_cpu_is_the_reference() -> None:
    case = _case((9, 40, 16, 2), torch.bfloat16, bias=False)
    auto = selective_logprob(case.hidden, case.weight, case.tokens, TAU)
    plain = selective_logprob(case.hidden, case.weight, case.tokens, TAU, backend="torch")
    kernel = selective_logprob(case.hidden, case.weight, case.tokens, TAU, backend="triton")
    assert torch.equal(auto[0], plain[0])
    assert not torch.equal(auto[0], kernel[0]), "the reference rounds bfloat16 logits, the kernel does not"


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_rows(backend: str) -> None:
    logprob, entropy = selective_logprob(
        torch.zeros(0, 8), torch.zeros(11, 8), torch.zeros(0, 3, dtype=torch.int64), 1.0, backend=backend
    )
    assert logprob.shape == (0, 3)
    assert entropy.shape == (0, 1)


def test_refusals() -> None:
    hidden, weight, tokens = torch.zeros(2, 8), torch.zeros(11, 8), torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="temperature > 0"):
        selective_logprob(hidden, weight, tokens, 0.0)
    with pytest.raises(ValueError, match="do not fit"):
        selective_logprob(hidden, weight[:, :7], tokens, 1.0)
    with pytest.raises(ValueError, match="the head's weight is"):
        selective_logprob(hidden, weight.bfloat16(), tokens, 1.0)
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        selective_logprob(hidden.double(), weight.double(), tokens, 1.0, backend="triton")


def test_only_a_plain_head_is_replaced() -> None:
    head = nn.Linear(8, 11, bias=False)
    weight, bias = plain_head(head)
    assert weight is head.weight
    assert bias is None
    head.register_forward_hook(lambda *_: None)
    assert plain_head(head) is None
    model = get_peft_model(tiny_model("llama", vocab=20), LoraConfig(r=2, target_modules=["lm_head"]))
    assert plain_head(model.get_base_model().get_output_embeddings()) is None
