"""Run one model over rows and record what it does. Legend: see `geometry.py`.

Nothing here knows where models and rows come from: the trainer uses it on the policy it is training,
the evaluation stage on finished models. Two models measured with the same seed and rows get the same
random numbers for every sampled token, so their difference is not blurred by sampling noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ebft_core.attention.packed import Backend
from ebft_core.blocks import Blocks, first_duplicates
from ebft_core.config import RunConfig
from ebft_core.evaluation.examples import document_at
from ebft_core.evaluation.records import BlockRecord, LikelihoodRecord, Measurements
from ebft_core.evaluation.sampling import Row, sample_blocks
from ebft_core.features import extract_features
from ebft_core.geometry import NO_ANCHOR, pack_layout
from ebft_core.logprobs import IGNORE, PackedOutput, packed_forward
from ebft_core.losses import cfm
from ebft_core.model_parts import evaluation_mode
from ebft_core.rewards import valid_groups
from ebft_core.rows import RowBatch, collate_rows


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
    stop_token_ids: Sequence[int] = (),
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
        stop_token_ids: tokens that end a turn of a completion; structured mode needs them.
        progress: called with the number of rows that were just finished.

    Raises:
        UserError: the architecture is not supported. FloatingPointError: the policy has diverged.
        ValueError: structured mode without `stop_token_ids`.
    """
    measurements = Measurements()
    for start in range(0, len(rows), batch_rows):
        part = rows[start : start + batch_rows]
        batch = collate_rows(part, config, pad_token_id).to(_device(policy))
        with torch.no_grad(), evaluation_mode(policy):
            blocks = sample_blocks(
                policy,
                part,
                batch,
                config,
                n_samples=n_samples,
                seed=seed,
                pad_token_id=pad_token_id,
                stop_token_ids=stop_token_ids,
            )
            output = packed_forward(
                policy,
                batch.input_ids_RL,
                batch.anchors_RA,
                blocks.tokens_RANG,
                temperature=config.ebft.temperature,
                labels_RL=batch.labels_RL,
                document_ids_RL=batch.document_ids_RL,
                attention=attention,
                blocks=blocks,
            )
        measurements.likelihoods += _likelihoods(part, batch, output)
        measurements.blocks += _blocks(part, batch, output, blocks, feature_model, config, attention)
        if progress is not None:
            progress(len(part))
    return measurements


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


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
    blocks: Blocks,
    feature_model: nn.Module,
    config: RunConfig,
    attention: Backend,
) -> Iterator[BlockRecord]:
    """One record for every anchor, in the order of rows and anchors."""
    phi_RAND, target_RAD = _features(batch, blocks, feature_model, config, attention)
    blocks, anchors_RA = blocks.to(torch.device("cpu")), batch.anchors_RA.cpu()
    distance, usable_RA = cfm(phi_RAND, target_RAD), valid_groups(phi_RAND, target_RAD)
    alignment_RAN = torch.einsum("rand,rad->ran", phi_RAND.double(), target_RAD.double())
    diversity_RA = _mean_similarity(phi_RAND)
    first_RAN = first_duplicates(blocks.tokens_RANG, blocks.length_RAN)
    duplicate_RAN = first_RAN != torch.arange(first_RAN.shape[2])
    # Entropies are 0 where there is no action.
    actions_RA = blocks.action_RANG.sum(dim=(-1, -2)).clamp(min=1)
    entropy_RA = output.entropy_RANG.double().cpu().sum(dim=(-1, -2)) / actions_RA
    for r, a in (anchors_RA != NO_ANCHOR).nonzero().tolist():
        tokens, written = blocks.tokens_RANG[r, a].tolist(), blocks.action_RANG[r, a].tolist()
        lengths, cut_RAN = blocks.length_RAN[r, a].tolist(), blocks.truncated_RAN
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
            tokens=tuple(tuple(block[:n]) for block, n in zip(tokens, lengths, strict=True)),
            written=tuple(tuple(block[:n]) for block, n in zip(written, lengths, strict=True)),
            truncated=None if cut_RAN is None else tuple(cut_RAN[r, a].tolist()),
        )


def _features(
    batch: RowBatch, blocks: Blocks, feature_model: nn.Module, config: RunConfig, attention: Backend
) -> tuple[Tensor, Tensor]:
    """`phi_RAND` and `target_RAD` on the CPU, computed where the feature network is."""
    device = _device(feature_model)
    there, blocks = batch.to(device), blocks.to(device)
    phi_RAND, target_RAD = extract_features(
        feature_model,
        there.input_ids_RL,
        there.anchors_RA,
        blocks.tokens_RANG,
        feature_layers=config.ebft.feature_layers,
        embed_method=config.ebft.embed_method,
        document_ids_RL=there.document_ids_RL,
        attention=attention,
        blocks=blocks,
        target_length_RA=there.target_length_RA,
        target_action_RL=there.is_target_RL,
    )
    return phi_RAND.cpu(), target_RAD.cpu()


def _mean_similarity(phi_RAND: Tensor) -> Tensor:
    """Mean inner product of two different samples, `(R, A)`; NaN for N = 1.

    ‖Σ φ_j‖² = Σ ‖φ_j‖² + the sum over ordered pairs.
    """
    phi_RAND = phi_RAND.double()
    N = phi_RAND.shape[2]
    own_RA = phi_RAND.square().sum(dim=(-1, -2))
    all_RA = phi_RAND.sum(dim=2).square().sum(dim=-1)
    return (all_RA - own_RA) / (N * (N - 1)) if N > 1 else torch.full_like(own_RA, float("nan"))
