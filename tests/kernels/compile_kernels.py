"""Compiles the kernels for a GPU that is not there; prints what each needs as JSON.

A program of its own because Triton is either compiler or interpreter in a process. No driver is needed: the
assembler comes with Triton.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ebft_core.kernels import group_gram_triton as gram
from ebft_core.kernels import selective_logprob_triton as logprob

_INTEGERS = {
    "X",
    "V",
    "H",
    "A",
    "tiles_per_split",
    "stride_sr",
    "stride_sa",
    "stride_sn",
    "stride_tr",
    "stride_ta",
}
_ALIGNED = [["tt.divisibility", 16]]


def compile_kernel(
    kernel: Any, capability: int, pointers: dict[str, str], constants: dict[str, Any], warps: int, stages: int
) -> dict[str, Any]:
    """Compile one kernel with pointers and row lengths that are multiples of 16, as they are in models."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in pointers:
            signature[name] = pointers[name]
        else:
            signature[name] = "i32" if name in _INTEGERS else "fp32"
    aligned = {(i,): _ALIGNED for i, name in enumerate(kernel.arg_names) if name in pointers or name == "H"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {
        "kernel": kernel.__name__,
        "capability": capability,
        "shared": made.metadata.shared,
        "tensor_cores": any(name in made.asm["ptx"] for name in ("wgmma.mma_async", "mma.sync")),
        "bytes": len(made.asm["cubin"]),
    }


def main() -> None:
    """All kernels in bfloat16: the wide tile for Hopper, the next smaller one for Ada; then wide sums."""
    half = "*bf16"
    common = {
        "N": 4,
        "HAS_BIAS": False,
        "EVEN_H": True,
        "PRECISION": "ieee",
        "UPCAST": False,
        "bias_ptr": None,
    }
    made = []
    for capability, width in ((90, 256), (89, 128)):
        blocks = {**common, "BLOCK_X": 128, "BLOCK_V": width, "BLOCK_H": 64}
        pointers = {"hidden_ptr": half, "weight_ptr": half, "tokens_ptr": "*i64", "lse_ptr": "*fp32"}
        forward = {**pointers, "picked_ptr": "*fp32", "mean_ptr": "*fp32"}
        backward = {**pointers, "grad_ptr": "*fp32", "d_logits_ptr": half}
        made.append(compile_kernel(logprob._forward_kernel, capability, forward, blocks, 8, 3))
        made.append(compile_kernel(logprob._gradient_kernel, capability, backward, blocks, 8, 3))
    for states, out, wide in ((half, "*fp32", False), ("*fp32", "*fp64", True)):
        pointers = {"sample_ptr": states, "target_ptr": states, "gram_ptr": out}
        blocks = {"BLOCK_M": 8, "BLOCK_H": 64} if wide else {"BLOCK_M": 16, "BLOCK_H": 128}
        constants = {"N": 4, "LAYERS": 3, "WIDE": wide, "UPCAST": False, "ADD": True, **blocks}
        made.append(compile_kernel(gram._gram_kernel, 90, pointers, constants, 4, 3))
    sys.stdout.write(json.dumps(made) + "\n")


if __name__ == "__main__":
    main()
