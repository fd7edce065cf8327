"""What each Triton kernel saves: time and peak memory beside plain torch and other libraries.

    python -m benchmarks.kernels

needs a CUDA device and says so where there is none. Shapes are those of one row of 1,024 tokens in the
paper's setting on a model of 1.2B parameters: 3,683 scored positions, vocabulary 128,256, hidden size 2,048,
bfloat16; Gram matrices and the loss have 16 rows. Liger (`liger-kernel`) and cut cross-entropy
(`cut-cross-entropy`) are timed when they can be imported; they are no dependencies. Both take one target per
hidden state and return no entropy, so they do a little less.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from rich.console import Console
from torch import Tensor

from ebft_core.bench.measure import clock_of
from ebft_core.kernels.group_gram import group_gram
from ebft_core.kernels.selective_logprob import selective_logprob
from ebft_core.losses import policy_gradient_loss
from ebft_core.whitening import gram_of

TEMPERATURE = 0.6
TILES = ((64, 256, 64, 8, 4), (128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (128, 256, 64, 8, 4))
"""Candidates for the tile of `selective_logprob`: X, V, H, warps, stages."""


@dataclass(frozen=True)
class Sizes:
    """Shapes to measure at."""

    X: int = 3683
    V: int = 128_256
    H: int = 2048
    groups: int = 2032
    N: int = 4
    rounds: int = 7
    repeats: int = 3


TINY = Sizes(X=9, V=70, H=16, groups=3, rounds=1, repeats=1)


class Contender(NamedTuple):
    """One way to do the work; returns what its gradient flows from, or None."""

    name: str
    run: Callable[[], Tensor | None]


def measure(device: torch.device, sizes: Sizes | None = None) -> dict[str, Any]:
    """Milliseconds and megabytes of every contender, by operation."""
    sizes = sizes or Sizes()
    torch.manual_seed(0)
    result = {
        "selective_logprob forward and backward": _logprob(device, sizes, backward=True, frozen=False),
        "selective_logprob forward and backward, head frozen": _logprob(
            device, sizes, backward=True, frozen=True
        ),
        "selective_logprob forward": _logprob(device, sizes, backward=False, frozen=True),
        "group_gram": _gram(device, sizes),
        "policy gradient loss (torch only, for scale)": _loss(device, sizes),
    }
    if device.type == "cuda":
        result["selective_logprob tiles"] = _tiles(device, sizes)
    return result


def kernel_runs(device: torch.device) -> bool:
    """Whether the Triton kernels can run here: compiled, or in Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    from triton import knobs

    return device.type == "cuda" or bool(knobs.runtime.interpret)


def _logprob(device: torch.device, sizes: Sizes, *, backward: bool, frozen: bool) -> dict[str, Any]:
    dtype = torch.bfloat16
    hidden = torch.randn(sizes.X, sizes.H, device=device).to(dtype).requires_grad_(backward)
    weight = (torch.randn(sizes.V, sizes.H, device=device) / sizes.H**0.5).to(dtype)
    weight.requires_grad_(backward and not frozen)
    tokens = torch.randint(0, sizes.V, (sizes.X, 1), device=device)

    def ours(backend: str) -> Callable[[], Tensor]:
        return lambda: selective_logprob(hidden, weight, tokens, TEMPERATURE, backend=backend)[0]

    contenders = [Contender("reference", ours("torch"))]
    if kernel_runs(device):
        contenders.append(Contender("kernel", ours("triton")))
    contenders += _others(hidden, weight, tokens[:, 0]) if device.type == "cuda" else []
    leaves = [hidden, weight]
    return {c.name: _time(c, leaves, device, sizes, backward=backward) for c in contenders}


def _others(hidden: Tensor, weight: Tensor, target: Tensor) -> Iterator[Contender]:
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss(reduction="none")
        yield Contender("liger", lambda: liger(weight, hidden / TEMPERATURE, target))
    if importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy

        yield Contender(
            "cut cross-entropy",
            lambda: linear_cross_entropy(hidden / TEMPERATURE, weight, target, reduction="none"),
        )


def _gram(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    shape = (1, sizes.groups, sizes.N, sizes.H)
    samples = [torch.randn(shape, device=device).bfloat16() for _ in range(3)]
    targets = [sample[:, :, 0] * 0.5 for sample in samples]

    def features() -> None:
        """The way without a kernel: unit features in float32, then their products in float64."""
        unit = torch.nn.functional.normalize
        phi = torch.cat([unit(s.float(), dim=-1) for s in samples], dim=-1) / 3**0.5
        gram_of(phi, torch.cat([unit(t.float(), dim=-1) for t in targets], dim=-1) / 3**0.5)

    contenders = [
        Contender("features, then products", features),
        Contender("reference", lambda: _nothing(group_gram(samples, targets, backend="torch"))),
    ]
    if kernel_runs(device):
        contenders.append(
            Contender("kernel", lambda: _nothing(group_gram(samples, targets, backend="triton")))
        )
    return {c.name: _time(c, [], device, sizes, backward=False) for c in contenders}


def _loss(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """16 rows of the paper's setting, forward and backward: what a fused kernel could save at most."""
    logprob = torch.randn(16, sizes.groups // 16 + 1, sizes.N, 8, device=device, requires_grad=True)
    advantage = torch.randn(logprob.shape[:3], device=device)
    contender = Contender("reference", lambda: policy_gradient_loss(advantage, logprob, logprob.numel()))
    return {contender.name: _time(contender, [logprob], device, sizes, backward=True)}


def _tiles(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """The kernel, forward and backward, under each candidate tile; one that does not fit leaves a text."""
    from triton import OutOfResources

    from ebft_core.kernels import selective_logprob_triton as kernels

    result: dict[str, Any] = {}
    for numbers in TILES:
        with mock.patch.object(kernels, "tile_for", lambda _hidden, found=numbers: kernels.Tile(*found)):
            try:
                measured = _logprob(device, sizes, backward=True, frozen=False)["kernel"]
            except OutOfResources as error:
                measured = {"error": str(error)}
        result["x".join(map(str, numbers))] = measured
    return result


def _nothing(_: Tensor) -> None:
    return None


def _time(
    contender: Contender, leaves: list[Tensor], device: torch.device, sizes: Sizes, *, backward: bool
) -> dict[str, float]:
    """Median milliseconds per call, and the memory a call takes beyond its inputs."""

    def call() -> None:
        for leaf in leaves:
            leaf.grad = None
        output = contender.run()
        if backward and output is not None:
            output.sum().backward()

    clock = clock_of(device)
    call()
    seconds = []
    with _peak(device) as memory:
        for _ in range(sizes.rounds):
            start = clock()
            for _ in range(sizes.repeats):
                call()
            seconds.append((clock() - start) / sizes.repeats)
    return {"ms": 1e3 * statistics.median(seconds), **memory}


@contextmanager
def _peak(device: torch.device) -> Iterator[dict[str, float]]:
    """Fills in the growth of allocated memory inside the block, on CUDA."""
    found: dict[str, float] = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    yield found
    if device.type == "cuda":
        found["peak_mb"] = (torch.cuda.max_memory_allocated(device) - before) / 2**20


def main() -> None:
    """Print the figures as JSON; without a GPU, say that there is nothing to measure."""
    if not torch.cuda.is_available():
        Console(stderr=True).print("kernels: no CUDA device here, nothing measured")
        return
    sys.stdout.write(json.dumps(measure(torch.device("cuda")), indent=1) + "\n")


if __name__ == "__main__":
    main()
