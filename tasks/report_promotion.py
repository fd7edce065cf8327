"""What the gate said about a run's model, as rows of the report and of Prefect's table."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ebft_core.metrics import metric_of
from ebft_core.promotion import Check, Decision

DECISION_JSON = "decision.json"
"""In the run's folder: the decision, with `name` and `version` of the model and `by`, who made it."""


def promotion_view(run_dir: Path) -> dict[str, Any] | None:
    """Model, version, outcome and checks; None for a run whose model was not judged."""
    path = run_dir / DECISION_JSON
    if not path.exists():
        return None
    document = json.loads(path.read_text(encoding="utf-8"))
    decision = Decision.from_json(document)
    return {
        "model": f"{document['name']} version {document['version']}",
        "promoted": decision.promote,
        "reason": decision.reason,
        "by": document["by"],
        "checks": check_rows(decision),
    }


def check_rows(decision: Decision) -> list[dict[str, str]]:
    """One row of text per check."""
    return [
        {
            "metric": metric_of(check.metric).label,
            "against": check.against,
            "difference": _number(check.difference),
            "interval": f"[{_number(check.interval[0])}, {_number(check.interval[1])}]",
            "must lie": _needed(check),
            "verdict": "passed" if check.passed else "failed",
        }
        for check in decision.checks
    ]


def _needed(check: Check) -> str:
    side = "below" if metric_of(check.metric).better == "lower" else "above"
    return f"{side} {check.bound:+.4f}"


def _number(value: float) -> str:
    return "not determined" if math.isnan(value) else f"{value:+.4f}"
