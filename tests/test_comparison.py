"""The answer of a comparison: yes, no or not determined, as the intervals say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from ebft_core.arms import BASE
from ebft_core.bootstrap import PairedEstimate
from ebft_core.comparison import ArmsComparison, best_arm, joint_confidence, judge
from ebft_core.evaluation.summary import Evaluation

NAN = float("nan")
SURE, UNSURE = 0.01, 1.0
"""Half widths of intervals: far smaller and far larger than the differences used here."""


def estimate(base: float, tuned: float, half: float) -> PairedEstimate:
    d = tuned - base
    return PairedEstimate(base, tuned, d, half / 2, (d - half, d + half), (0, 1), (0, 1), 7)


def comparison(
    cfm: Mapping[str, float],
    ce: Mapping[str, float] | None = None,
    *,
    half: Mapping[str, float] | None = None,
    kind: Any = "compare",
) -> ArmsComparison:
    """All arms by their CFM; `half` widths of the contrast with each arm, small unless given."""
    ce = ce or dict.fromkeys(cfm, 1.0)
    best = best_arm("cfm", cfm)
    counts = {"rows": 7, "documents": 7, "tokens": 9, "blocks": 9, "dropped_base": 0, "dropped_tuned": 0}
    settings = {"n_samples": 4, "seed": 0, "confidence": 0.95, "bootstrap_samples": 50}

    def both(a: str, b: str, width: float) -> dict[str, PairedEstimate]:
        others = dict.fromkeys(("alignment", "duplicate_rate"), estimate(0.1, 0.1, SURE))
        return {"cfm": estimate(cfm[a], cfm[b], width), "ce": estimate(ce[a], ce[b], SURE), **others}

    return ArmsComparison(
        kind=kind,
        metric="cfm",
        budget="40 optimiser steps",
        best=best,
        stages={name: "sft" if name == "sft" else "merge" for name in cfm if name != BASE},
        arms={
            name: Evaluation("b", "t", **counts, **settings, metrics=both(BASE, name, SURE))
            for name in cfm
            if name != BASE
        },
        contrast_confidence=0.975,
        contrasts={name: both(name, best, (half or {}).get(name, SURE)) for name in cfm if name != best},
    )


CASES = [
    ({BASE: 0.7, "sft": 0.5, "ebft": 0.4}, {}, "Yes: `ebft`"),
    ({BASE: 0.7, "sft": 0.4, "ebft": 0.5}, {}, "No: SFT is the better choice"),
    ({BASE: 0.7, "sft": 0.5, "ebft": 0.4}, {"sft": UNSURE}, "Not determined: `ebft`"),
    ({BASE: 0.7, "sft": 0.4, "ebft": 0.5}, {"ebft": UNSURE}, "Not determined: `sft`"),
    ({BASE: 0.4, "sft": 0.5, "ebft": 0.6}, {}, "No: no arm is better than the untrained base"),
    ({BASE: 0.7, "sft": 0.5, "ebft": 0.4}, {BASE: UNSURE}, "Not determined: `ebft`"),
    ({BASE: 0.7, "sft": 0.5, "ebft": 0.4}, {"sft": NAN}, "Not determined"),
    ({BASE: 0.7, "sft": 0.5, "ebft": 0.6, "sft+ebft": 0.4}, {}, "Yes: `sft+ebft`"),
    ({BASE: 0.7, "ebft": 0.4}, {}, "Best: `ebft`"),  # without SFT the question is not asked
    ({BASE: 0.7, "sft": 0.4}, {}, "Best: `sft`"),
]


@pytest.mark.parametrize(("cfm", "half", "beginning"), CASES)
def test_the_answer_is_what_the_intervals_say(
    cfm: dict[str, float], half: dict[str, float], beginning: str
) -> None:
    answer = comparison(cfm, half=half).answer
    assert answer.startswith(beginning), answer
    assert answer.endswith("on 7 held-out documents after 40 optimiser steps.")


def test_sft_is_held_against_the_best_arm_of_ebft() -> None:
    answer = comparison({BASE: 0.7, "sft": 0.4, "ebft": 0.6, "ebft+ce": 0.5}).answer
    assert "`ebft+ce` of 0.5000" in answer
    assert "`ebft` of" not in answer


def test_the_price_in_cross_entropy_is_not_hidden() -> None:
    cfm = {BASE: 0.7, "sft": 0.5, "ebft": 0.4}
    dear = comparison(cfm, {BASE: 2.0, "sft": 1.0, "ebft": 1.5}).answer
    assert "but its cross-entropy is worse by 0.5000 nats per token" in dear
    assert "cross-entropy" not in comparison(cfm, {BASE: 2.0, "sft": 1.5, "ebft": 1.0}).answer


def test_a_sweep_names_what_cannot_be_told_from_the_best() -> None:
    cfm = {BASE: 0.7, "a=1": 0.4, "a=2": 0.41, "a=3": 0.6}
    answer = comparison(cfm, half={"a=2": UNSURE}, kind="sweep").answer
    assert answer.startswith("Best: `a=1`")
    assert "not to be told from it: `a=2`, on" in answer


def test_json_reads_back_and_holds_no_nan() -> None:
    before = comparison({BASE: 0.7, "sft": 0.5, "ebft": 0.4}, half={"sft": NAN})
    text = json.dumps(before.to_json(), allow_nan=False)
    after = ArmsComparison.from_json(json.loads(text))
    assert after.answer == before.answer
    assert after.to_json() == before.to_json()
    with pytest.raises(ValueError, match="not a comparison"):
        ArmsComparison.from_json({"schema": "other"})


def test_the_best_arm_goes_by_the_metrics_direction_and_skips_what_is_no_number() -> None:
    values = {"a": 0.2, "b": 0.1, "c": NAN}
    assert (best_arm("cfm", values), best_arm("alignment", values)) == ("b", "a")
    with pytest.raises(ValueError, match="no arm is best"):
        best_arm("cfm", {"c": NAN})
    with pytest.raises(ValueError, match="no arm is best"):
        best_arm("entropy", values)  # neither direction is good


def test_judgement_follows_the_direction() -> None:
    assert judge("cfm", estimate(0.5, 0.4, SURE)) == "better"
    assert judge("alignment", estimate(0.5, 0.4, SURE)) == "worse"
    assert judge("cfm", estimate(0.5, 0.4, UNSURE)) is None


def test_joint_intervals_miss_together_as_often_as_one() -> None:
    assert joint_confidence(0.95, 1) == pytest.approx(0.95)
    assert 5 * (1 - joint_confidence(0.95, 5)) == pytest.approx(0.05)
