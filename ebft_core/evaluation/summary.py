"""The result of a comparison, and its JSON form (`evaluation.json`, schema `ebft.evaluation/1`):

    {"schema": "ebft.evaluation/1",
     "mode",                                            strided | structured
     "base": {"path"}, "tuned": {"path"},               the two models
     "rows", "documents", "tokens", "blocks",           how much was measured (tokens: supervised ones)
     "dropped_blocks": {"base", "tuned"},               blocks with unusable features, in no mean
     "n_samples", "seed", "confidence", "bootstrap_samples",
     "metrics": {name: {"base", "tuned", "difference",  difference = tuned - base
                        "standard_error",               of the difference
                        "interval", "base_interval", "tuned_interval",   [low, high]
                        "documents",                    resampled documents
                        "label", "better", "per"}},     better: lower | higher | null
                                                        per: token | block | problem
     "against": {name: {"path", "metrics"}}}            further models in the place of base

A number that the data do not determine (an interval over one document, CFM with one sample) is null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from ebft_core.bootstrap import PairedEstimate
from ebft_core.metrics import metric_of

SCHEMA = "ebft.evaluation/1"

Spans = tuple[tuple[int, int], ...]
"""Parts of a text: (first character, character behind the last)."""


@dataclass(frozen=True)
class Reference:
    """A further model, compared with the tuned one: it is the `base` of its estimates."""

    path: str
    metrics: Mapping[str, PairedEstimate]

    def to_json(self) -> dict[str, Any]:
        """JSON values under the same names."""
        return {"path": self.path, "metrics": _metrics_json(self.metrics)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return cls(values["path"], _metrics_from_json(values["metrics"]))


@dataclass(frozen=True)
class Evaluation:
    """Base and tuned model on the same held-out rows; `metrics` by the names that `metric_of` knows.

    `against` holds the same for further models, by their names in `evaluate.against`.
    """

    base_path: str
    tuned_path: str
    rows: int
    documents: int
    tokens: int
    blocks: int
    dropped_base: int
    dropped_tuned: int
    n_samples: int
    seed: int
    confidence: float
    bootstrap_samples: int
    metrics: Mapping[str, PairedEstimate]
    mode: Literal["strided", "structured"] = "strided"
    against: Mapping[str, Reference] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The document described above."""
        return {
            "schema": SCHEMA,
            "mode": self.mode,
            "base": {"path": self.base_path},
            "tuned": {"path": self.tuned_path},
            "rows": self.rows,
            "documents": self.documents,
            "tokens": self.tokens,
            "blocks": self.blocks,
            "dropped_blocks": {"base": self.dropped_base, "tuned": self.dropped_tuned},
            "n_samples": self.n_samples,
            "seed": self.seed,
            "confidence": self.confidence,
            "bootstrap_samples": self.bootstrap_samples,
            "metrics": _metrics_json(self.metrics),
            "against": {name: reference.to_json() for name, reference in self.against.items()},
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Evaluation:
        """The inverse of `to_json`.

        Raises:
            ValueError: another schema.
        """
        if document.get("schema") != SCHEMA:
            raise ValueError(f"not an evaluation: schema {document.get('schema')!r}, expected {SCHEMA!r}")
        plain = (
            "rows",
            "documents",
            "tokens",
            "blocks",
            "n_samples",
            "seed",
            "confidence",
            "bootstrap_samples",
        )
        return cls(
            base_path=document["base"]["path"],
            tuned_path=document["tuned"]["path"],
            dropped_base=document["dropped_blocks"]["base"],
            dropped_tuned=document["dropped_blocks"]["tuned"],
            metrics=_metrics_from_json(document["metrics"]),
            # The rest is not in the files of earlier versions.
            mode=document.get("mode", "strided"),
            against={k: Reference.from_json(value) for k, value in document.get("against", {}).items()},
            **{name: document[name] for name in plain},
        )


@dataclass(frozen=True)
class CompletionNote:
    """What a completion's text does not show.

    Attributes:
        tokens: how many the model wrote.
        truncated: it met its length bound before it ended.
        given: characters that the model did not write: a user's turns.
    """

    tokens: int
    truncated: bool
    given: Spans = ()


@dataclass(frozen=True)
class RolloutExample:
    """One anchor for people to read: what stands before it, what follows, and what both models wrote.

    Attributes:
        ground_truth_given: characters of the ground truth that a policy would not have to write.
        base_notes, tuned_notes: one per sample where the samples are whole completions, else empty.
    """

    row_id: int
    document: str
    anchor: int
    context: str
    ground_truth: str
    base_samples: tuple[str, ...]
    tuned_samples: tuple[str, ...]
    base_alignments: tuple[float, ...]
    tuned_alignments: tuple[float, ...]
    ground_truth_given: Spans = ()
    base_notes: tuple[CompletionNote, ...] = ()
    tuned_notes: tuple[CompletionNote, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON values under the same names."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`; what a file of an earlier version does not have stays empty."""
        plain = {name: _tuples(value) for name, value in values.items()}
        for name in ("base_notes", "tuned_notes"):
            notes = values.get(name, ())
            plain[name] = tuple(CompletionNote(**{**note, "given": _tuples(note["given"])}) for note in notes)
        return cls(**plain)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _metrics_json(metrics: Mapping[str, PairedEstimate]) -> dict[str, Any]:
    return {name: _metric_json(name, estimate) for name, estimate in metrics.items()}


def _metrics_from_json(values: Mapping[str, Any]) -> dict[str, PairedEstimate]:
    return {name: PairedEstimate.from_json(value) for name, value in values.items()}


def _metric_json(name: str, estimate: PairedEstimate) -> dict[str, Any]:
    metric = metric_of(name)
    return {**estimate.to_json(), "label": metric.label, "better": metric.better, "per": metric.per}
