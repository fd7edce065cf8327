"""Run one model over rows and record what it does. Legend: see `geometry.py`.

Nothing here knows where models and rows come from: the trainer uses it on the policy it is training,
the evaluation stage on finished models. Two models measured with the same seed and rows get the same
random numbers for every sampled token, so their difference is not blurred by sampling noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ebft_core.attention.packed import Backend
from ebft_core.blocks import first_duplicates
from ebft_core.config import RunConfig
from ebft_core.evaluation.records import BlockRecord, LikelihoodRecord, Measurements
from ebft_core.features import extract_features
from ebft_core.geometry import NO_ANCHOR, pack_layout
from ebft_core.logprobs import IGNORE, PackedOutput, packed_forward
from ebft_core.losses import cfm
from ebft_core.model_parts import evaluation_mode
from ebft_core.rewards import valid_groups
from ebft_core.rows import RowBatch, collate_rows, row_uniforms
from ebft_core.samplers.strided import rollout

Row = Mapping[str, Any]


def evaluate_rows(
    policy: nn.Module,
    feature_model: nn.Module,
    rows: Sequence[Row],
    config: RunConfig,
    *,
    n_samples: int,
    seed: int,
    pad_token_id: int,
    batch_rows: int,
    attention: Backend = "sdpa",
    progress: Callable[[int], None] | None = None,
) -> Measurements:
    """Measure `policy` on tokenized rows (with a `row_id` column that seeds their random numbers).

    Logits exist for a bounded number of positions at a time; memory grows with `batch_rows` and with
    the longest row, not with the number of rows.

    Args:
        policy: the model that is measured; it need not be on the device of `feature_model`.
        feature_model: the frozen feature network; a PEFT model runs with its adapters disabled.
        n_samples: N, samples per anchor.
        seed: of the rollouts.
        progress: called with the number of rows that were just finished.

    Raises:
        UserError: the architecture is not supported. FloatingPointError: the policy has diverged.
    """
    measurements = Measurements()
    for start in range(0, len(rows), batch_rows):
        part = rows[start : start + batch_rows]
        batch = collate_rows(part, config, pad_token_id).to(_device(policy))
        with torch.no_grad(), evaluation_mode(policy):
            tokens_RANG = _sample(policy, batch, config, n_samples, seed)
            output = packed_forward(
                policy,
                batch.input_ids_RL,
                batch.anchors_RA,
                tokens_RANG,
                temperature=config.ebft.temperature,
                labels_RL=batch.labels_RL,
                document_ids_RL=batch.document_ids_RL,
                attention=attention,
            )
        measurements.likelihoods += _likelihoods(part, batch, output)
        measurements.blocks += _blocks(part, batch, output, tokens_RANG, feature_model, config, attention)
        if progress is not None:
            progress(len(part))
    return measurements


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _sample(policy: nn.Module, batch: RowBatch, config: RunConfig, n_samples: int, seed: int) -> Tensor:
    ebft = config.ebft
    shape = (batch.anchors_RA.shape[1], n_samples, ebft.generate_max_len)
    return rollout(
        policy,
        batch.input_ids_RL,
        batch.anchors_RA,
        n_samples=n_samples,
        generate_max_len=ebft.generate_max_len,
        temperature=ebft.temperature,
        top_p=ebft.top_p,
        document_ids_RL=batch.document_ids_RL,
        uniforms_RANG=row_uniforms(batch.row_ids_R, seed=seed, step=0, shape=shape),
    )


def _likelihoods(rows: Sequence[Row], batch: RowBatch, output: PackedOutput) -> Iterator[LikelihoodRecord]:
    """Sums of the negative log-likelihood over each document of each row."""
    assert output.label_logprob_RL is not None
    no_anchors = batch.anchors_RA[:, :0]
    L = batch.input_ids_RL.shape[1]
    position_RL = pack_layout(no_anchors, 1, 1, L, batch.document_ids_RL).position_RT
    # The first token of a document has no predictor and is not scored.
    scored_RL = ((batch.labels_RL != IGNORE) & (position_RL != 0)).cpu()
    nll_RL = -output.label_logprob_RL.double().cpu()
    for index, row in enumerate(rows):
        start = 0
        for length, document in zip(row["document_lengths"], row["document_hashes"], strict=True):
            span = slice(start, start + length)
            start += length
            tokens = int(scored_RL[index, span].sum())
            if tokens:
                nll_sum = float(nll_RL[index, span][scored_RL[index, span]].sum())
                yield LikelihoodRecord(int(batch.row_ids_R[index]), document, nll_sum, tokens)


def _blocks(
    rows: Sequence[Row],
    batch: RowBatch,
    output: PackedOutput,
    tokens_RANG: Tensor,
    feature_model: nn.Module,
    config: RunConfig,
    attention: Backend,
) -> Iterator[BlockRecord]:
    """One record for every anchor, in the order of rows and anchors."""
    there = batch.to(_device(feature_model))
    phi_RAND, target_RAD = extract_features(
        feature_model,
        there.input_ids_RL,
        there.anchors_RA,
        tokens_RANG.to(there.input_ids_RL.device),
        feature_layers=config.ebft.feature_layers,
        embed_method=config.ebft.embed_method,
        document_ids_RL=there.document_ids_RL,
        attention=attention,
    )
    phi_RAND, target_RAD = phi_RAND.cpu(), target_RAD.cpu()
    distance, usable_RA = cfm(phi_RAND, target_RAD), valid_groups(phi_RAND, target_RAD)
    alignment_RAN = torch.einsum("rand,rad->ran", phi_RAND.double(), target_RAD.double())
    diversity_RA = _mean_similarity(phi_RAND)
    duplicate_RAN = first_duplicates(tokens_RANG).cpu() != torch.arange(tokens_RANG.shape[2])
    entropy_RA = output.entropy_RANG.double().mean(dim=(-1, -2)).cpu()
    anchors_RA, tokens_RANG = batch.anchors_RA.cpu(), tokens_RANG.cpu()
    for r, a in (anchors_RA != NO_ANCHOR).nonzero().tolist():
        yield BlockRecord(
            row_id=int(batch.row_ids_R[r]),
            anchor=int(anchors_RA[r, a]),
            document=document_at(rows[r], int(anchors_RA[r, a]) - 1)[0],
            usable=bool(usable_RA[r, a]),
            cfm=float(distance.unbiased[r, a]),
            cfm_biased=float(distance.biased[r, a]),
            alignments=tuple(alignment_RAN[r, a].tolist()),
            diversity=float(diversity_RA[r, a]),
            duplicate_rate=float(duplicate_RAN[r, a].double().mean()),
            entropy=float(entropy_RA[r, a]),
            tokens=tuple(tuple(block) for block in tokens_RANG[r, a].tolist()),
        )


def _mean_similarity(phi_RAND: Tensor) -> Tensor:
    """Mean inner product of two different samples, `(R, A)`; NaN for N = 1.

    ‖Σ φ_j‖² = Σ ‖φ_j‖² + the sum over ordered pairs.
    """
    phi_RAND = phi_RAND.double()
    N = phi_RAND.shape[2]
    own_RA = phi_RAND.square().sum(dim=(-1, -2))
    all_RA = phi_RAND.sum(dim=2).square().sum(dim=-1)
    return (all_RA - own_RA) / (N * (N - 1)) if N > 1 else torch.full_like(own_RA, float("nan"))


def document_at(row: Row, position: int) -> tuple[str, int]:
    """Hash and first token of the document that holds token `position` of a row."""
    start = 0
    for length, document in zip(row["document_lengths"], row["document_hashes"], strict=True):
        if position < start + length:
            return str(document), start
        start += length
    raise IndexError(f"token {position} lies outside a row of {start} tokens")
