"""What an evaluation measures, one record per rollout block and per document. Imports without torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BlockRecord:
    """One anchor: N samples against the ground truth, on raw unit features.

    Attributes:
        row_id, anchor: where it is; `document`: hash of the document it belongs to.
        usable: its features are finite and not zero; otherwise it enters no mean and is counted.
        cfm, cfm_biased: ‖mean φ_j - y‖² without and with the samples' variance; cfm is NaN for N = 1.
        alignments: the cosine of every sample with the ground truth.
        diversity: mean cosine between different samples (small is diverse); NaN for N = 1.
        duplicate_rate: share of the samples that repeat an earlier one.
        entropy: mean entropy of the policy at the tokens it wrote, at the sampling temperature, in nats.
        tokens: the N sampled blocks: G token ids each, or as many as a completion has.
        written: for each of them, whether the policy wrote it; a user's turn inside a completion was given.
        truncated: completions that met their length bound before they ended; None for blocks of a fixed
            length.
    """

    row_id: int
    anchor: int
    document: str
    usable: bool
    cfm: float
    cfm_biased: float
    alignments: tuple[float, ...]
    diversity: float
    duplicate_rate: float
    entropy: float
    tokens: tuple[tuple[int, ...], ...]
    written: tuple[tuple[bool, ...], ...]
    truncated: tuple[bool, ...] | None = None

    @property
    def written_tokens(self) -> int:
        """Tokens that the policy wrote, in all samples."""
        return sum(map(sum, self.written))


@dataclass(frozen=True)
class LikelihoodRecord:
    """Cross-entropy of one document in one row: its sum in nats over so many supervised tokens."""

    row_id: int
    document: str
    nll_sum: float
    tokens: int


@dataclass
class Measurements:
    """Everything measured on one model, in the order of the rows."""

    blocks: list[BlockRecord] = field(default_factory=list)
    likelihoods: list[LikelihoodRecord] = field(default_factory=list)

    @property
    def dropped_blocks(self) -> int:
        """Blocks whose features cannot be used."""
        return sum(not block.usable for block in self.blocks)
