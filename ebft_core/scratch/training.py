"""Cross-entropy training of a small Llama on text, reproducible bit by bit from its seed.

The data order, the initial weights and the schedule are functions of the seed and the step alone, so a
run cut off anywhere and resumed from a checkpoint ends with the same weights as an unbroken one (on the
same machine with the same number of threads).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ebft_core.scratch.checkpoints import load_checkpoint, save_checkpoint
from ebft_core.scratch.corpus import Corpus
from ebft_core.stage_runner import Preempted
from ebft_core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ebft_core.config import FromScratchConfig
    from ebft_core.events import EventWriter
    from ebft_core.stop import StopSignal

SAVE_EVERY = 50
WARMUP_RATIO = 0.05
MAX_GRAD_NORM = 1.0
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01
EVAL_SEQUENCES = 128


@dataclass(frozen=True)
class Progress:
    """How training reports and when it stops: the stage's journal, stop signal and work folder."""

    events: EventWriter
    stop: StopSignal
    work: Path


def make_model(config: FromScratchConfig, tokenizer: Tokenizer) -> Any:
    """A freshly initialised Llama with tied embeddings, float32, seeded by `config.seed`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return LlamaForCausalLM(llama)


def train(model: Any, corpus: Corpus, config: FromScratchConfig, progress: Progress) -> Mapping[str, float]:
    """Train in place from the newest checkpoint in the work folder, or from the start.

    Returns:
        `steps`, `seconds` (of this attempt), `train_ce` (last step) and `heldout_ce`, in nats per token.

    Raises:
        Preempted: asked to stop; the work folder holds a checkpoint of the last finished step.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    begun = time.monotonic()
    step = load_checkpoint(progress.work, model, optimizer)
    if step:
        progress.events.message(f"base model: resumed after step {step}")
    loss = math.nan
    model.train()
    while step < config.max_steps:
        rate = learning_rate(step, config)
        loss = _update(model, optimizer, batch_RL(corpus.train_NL, step, config), rate)
        step += 1
        progress.events.metrics(
            step, {"base/ce_loss": loss, "train/learning_rate": rate}, total=config.max_steps
        )
        stop = progress.stop.requested  # looked at once: a stop in between must not skip the checkpoint
        if step % SAVE_EVERY == 0 or stop:
            save_checkpoint(progress.work, step, model, optimizer)
        if stop:
            raise Preempted(f"base model: after step {step}")
    return {
        "steps": step,
        "seconds": time.monotonic() - begun,
        "train_ce": loss,
        "heldout_ce": heldout_ce(model, corpus.heldout_NL[:EVAL_SEQUENCES], config.batch_size),
    }


def learning_rate(step: int, config: FromScratchConfig) -> float:
    """Rate of the 0-based `step`: linear warmup, then cosine towards zero."""
    warmup = max(1, round(WARMUP_RATIO * config.max_steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, config.max_steps - warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def batch_RL(train_NL: Tensor, step: int, config: FromScratchConfig) -> Tensor:
    """Rows of one step: every pass over the data has its own order, drawn from (seed, pass)."""
    count = len(train_NL)
    first = step * config.batch_size
    rows = []
    for position in range(first, first + config.batch_size):
        epoch, offset = divmod(position, count)
        rows.append(_order(config.seed, epoch, count)[offset])
    return train_NL[torch.stack(rows)]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(count, generator=generator)


def _update(model: Any, optimizer: torch.optim.AdamW, input_ids_RL: Tensor, rate: float) -> float:
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = _ce(model, input_ids_RL)
    if not bool(loss.isfinite()):
        raise FloatingPointError(f"cross-entropy of the base model became {loss.item()}")
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    return float(loss.detach())


def _ce(model: Any, input_ids_RL: Tensor) -> Tensor:
    logits_RLV = model(input_ids=input_ids_RL, use_cache=False).logits
    return nn.functional.cross_entropy(logits_RLV[:, :-1].flatten(0, 1), input_ids_RL[:, 1:].flatten())


@torch.no_grad()
def heldout_ce(model: Any, heldout_NL: Tensor, batch_size: int) -> float:
    """Mean cross-entropy in nats per predicted token."""
    model.eval()
    total = sum(float(_ce(model, rows_RL)) * len(rows_RL) for rows_RL in heldout_NL.split(batch_size))
    return total / len(heldout_NL)
