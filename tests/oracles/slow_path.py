"""The slow path: every block is one plain causal forward of `document[:anchor] + block`.

No packing, no cache, no mask, no position ids: only the library's model called on one sequence.
Written from the formulas, it shares no code with the package.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Padded rows with their anchors (and document ids where rows are packed from several documents)."""

    input_ids_RL: Tensor
    anchors_RA: Tensor
    lengths: tuple[int, ...]
    document_ids_RL: Tensor | None = None

    def document_start(self, row: int, anchor: int) -> int:
        """First token of the document that holds `anchor`."""
        if self.document_ids_RL is None:
            return 0
        ids_L = self.document_ids_RL[row]
        return int((ids_L == ids_L[anchor]).nonzero()[0])

    def prefix(self, row: int, anchor: int) -> Tensor:
        """The tokens before the anchor, in the anchor's own document."""
        return self.input_ids_RL[row, self.document_start(row, anchor) : anchor]

    def slots(self) -> Iterator[tuple[int, int, int]]:
        """(row, slot, anchor) of every real anchor."""
        for row, anchors_A in enumerate(self.anchors_RA.tolist()):
            for slot, anchor in enumerate(anchors_A):
                if anchor >= 0:
                    yield row, slot, anchor


def make_rows(
    lengths: list[int],
    anchors: list[list[int]],
    *,
    vocab: int,
    documents: list[list[int]] | None = None,
    seed: int = 0,
    pad: int = 0,
) -> Rows:
    """Random rows padded on the right; `documents` holds the lengths of each row's documents."""
    generator = torch.Generator().manual_seed(seed)
    width, slots = max(lengths), max(len(a) for a in anchors)
    input_ids_RL = torch.full((len(lengths), width), pad)
    anchors_RA = torch.full((len(lengths), slots), -1)
    ids_RL = torch.full((len(lengths), width), -1)
    for row, length in enumerate(lengths):
        input_ids_RL[row, :length] = torch.randint(0, vocab, (length,), generator=generator)
        anchors_RA[row, : len(anchors[row])] = torch.tensor(anchors[row], dtype=torch.long)
        counts = torch.tensor(documents[row] if documents else [length])
        ids_RL[row, :length] = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return Rows(input_ids_RL, anchors_RA, tuple(lengths), ids_RL if documents else None)


def random_tokens(rows: Rows, n_samples: int, generate_max_len: int, *, vocab: int, seed: int = 1) -> Tensor:
    """Arbitrary generated blocks (they need not come from the model)."""
    shape = (*rows.anchors_RA.shape, n_samples, generate_max_len)
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


def block_logits(model: torch.nn.Module, prefix: Tensor, block_G: Tensor) -> Tensor:
    """Logits (G, V) that predict each token of the block after the prefix."""
    sequence = torch.cat([prefix, block_G])[None]
    logits = model(input_ids=sequence, use_cache=False).logits[0]
    return logits[len(prefix) - 1 : len(prefix) - 1 + len(block_G)]


def slow_logprobs(model: torch.nn.Module, rows: Rows, tokens_RANG: Tensor, *, temperature: float) -> Tensor:
    """log softmax(logits / temperature)[token] block by block; 0 where there is no anchor."""
    blocks: dict[tuple[int, int, int], Tensor] = {}
    for row, slot, anchor in rows.slots():
        for sample, block_G in enumerate(tokens_RANG[row, slot]):
            logits_GV = block_logits(model, rows.prefix(row, anchor), block_G)
            logp_GV = torch.log_softmax(logits_GV.float() / temperature, dim=-1)
            blocks[row, slot, sample] = logp_GV.gather(-1, block_G[:, None])[:, 0]
    empty_G = torch.zeros(tokens_RANG.shape[-1])
    n_rows, n_slots, n_samples, _ = tokens_RANG.shape
    flat = [
        blocks.get((r, a, n), empty_G)
        for r in range(n_rows)
        for a in range(n_slots)
        for n in range(n_samples)
    ]
    return torch.stack(flat).view(tokens_RANG.shape)


def _pool(hidden_GH: Tensor, method: str) -> Tensor:
    length = len(hidden_GH)
    if method == "last_token":
        return hidden_GH[-1]
    if method == "concat":
        quarters = [length // 4, length // 2, 3 * length // 4]  # ⌊q·G⌋
        return torch.cat([hidden_GH[i] for i in quarters])
    return hidden_GH.mean(dim=0)  # every token of a strided block is an action


def _block_feature(model: Any, prefix: Tensor, block_G: Tensor, depths: list[float], method: str) -> Tensor:
    with torch.no_grad():
        output = model(
            input_ids=torch.cat([prefix, block_G])[None], output_hidden_states=True, use_cache=False
        )
    last = len(output.hidden_states) - 1
    parts = []
    for depth in depths:
        layer = min(max(math.floor(depth * last), 1), last)
        vector = _pool(output.hidden_states[layer][0, len(prefix) :].double(), method)
        parts.append(vector / vector.norm())
    return torch.cat(parts) / math.sqrt(len(depths))


def slow_features(
    model: Any, rows: Rows, tokens_RANG: Tensor, depths: list[float], method: str
) -> tuple[Tensor, Tensor]:
    """Zeros where there is no anchor."""
    n_rows, n_slots, n_samples, length = tokens_RANG.shape
    hidden = model.get_input_embeddings().weight.shape[1]
    width = hidden * len(depths) * (3 if method == "concat" else 1)
    phi = torch.zeros(n_rows, n_slots, n_samples, width, dtype=torch.float64)
    target = torch.zeros(n_rows, n_slots, width, dtype=torch.float64)
    for row, slot, anchor in rows.slots():
        prefix = rows.prefix(row, anchor)
        truth = rows.input_ids_RL[row, anchor : anchor + length]
        target[row, slot] = _block_feature(model, prefix, truth, depths, method)
        for sample, block in enumerate(tokens_RANG[row, slot]):
            phi[row, slot, sample] = _block_feature(model, prefix, block, depths, method)
    return phi, target


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Gradient of `loss` for every trainable parameter (zeros where it does not reach)."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(named.items(), grads, strict=True)
    }


def assert_same_gradients(
    actual: dict[str, Tensor], expected: dict[str, Tensor], *, rtol: float = 1e-4
) -> None:
    """Relative L2 error of each parameter's gradient.

    A parameter whose true gradient vanishes (a key bias, where softmax cancels it) is measured
    against a thousandth of the largest one.
    """
    assert actual.keys() == expected.keys()
    largest = max(g.norm().item() for g in expected.values())
    assert largest > 0
    for name, reference in expected.items():
        scale = max(reference.norm().item(), 1e-3 * largest)
        error = (actual[name] - reference).norm().item() / scale
        assert error < rtol, f"{name}: relative gradient error {error:.2e}"
