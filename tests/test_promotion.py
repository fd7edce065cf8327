"""The gate: what counts as better, what as harmless, and that doubt never promotes."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from ebft_core.bootstrap import PairedEstimate, paired_bootstrap
from ebft_core.config import PromotionConfig, parse_config
from ebft_core.errors import UserErrors
from ebft_core.promotion import Check, Decision, decide

MINIMAL = {"model": {"name_or_path": "m"}, "data": {"sources": [{"path": "a.txt"}]}}


def estimate(low: float, high: float) -> PairedEstimate:
    middle, ends = (low + high) / 2, (1.0, 1.0)
    return PairedEstimate(1.0, 1.0 + middle, middle, 0.1, (low, high), ends, ends, 9)


def rules(**values: object) -> PromotionConfig:
    return PromotionConfig(**{"guards": {}, **values})


def judged(metric: str, low: float, high: float, **values: object) -> Check:
    decision = decide({"base": {metric: estimate(low, high)}}, rules(metric=metric, **values))
    (check,) = decision.checks
    assert decision.promote == check.passed
    return check


@pytest.mark.parametrize(
    ("metric", "low", "high", "margin", "passed"),
    [
        ("cfm", -0.3, -0.1, 0.0, True),
        ("cfm", -0.3, 0.0, 0.0, False),  # zero is in the interval
        ("cfm", -0.3, 0.1, 0.0, False),
        ("cfm", 0.1, 0.3, 0.0, False),
        ("cfm", -0.3, -0.1, 0.05, True),
        ("cfm", -0.3, -0.1, 0.1, False),  # better by more than the margin, not by just as much
        ("alignment", 0.1, 0.3, 0.0, True),
        ("alignment", 0.0, 0.3, 0.0, False),
        ("alignment", -0.3, -0.1, 0.0, False),
        ("alignment", 0.1, 0.3, 0.2, False),
    ],
)
def test_better_means_the_whole_interval(
    metric: str, low: float, high: float, margin: float, passed: bool
) -> None:
    assert judged(metric, low, high, margin=margin).passed == passed


@pytest.mark.parametrize(
    ("metric", "low", "high", "most", "passed"),
    [
        ("ce", -0.1, 0.04, 0.05, True),
        ("ce", -0.1, 0.06, 0.05, False),  # the mean is better, its bad end is not harmless
        ("ce", 0.0, 0.0, 0.0, True),  # nothing changed
        ("alignment", -0.04, 0.1, 0.05, True),
        ("alignment", -0.06, 0.1, 0.05, False),
        ("tasks/code/pass@1", -0.06, 0.1, 0.05, False),
    ],
)
def test_a_guard_looks_at_the_bad_end(
    metric: str, low: float, high: float, most: float, passed: bool
) -> None:
    metrics = {"cfm": estimate(-0.3, -0.1), metric: estimate(low, high)}
    decision = decide({"base": metrics}, rules(guards={metric: most}))
    assert decision.promote == passed
    assert [check.passed for check in decision.checks] == [True, passed]


def test_it_must_beat_every_reference() -> None:
    better, worse = {"cfm": estimate(-0.3, -0.1)}, {"cfm": estimate(-0.1, 0.2)}
    assert decide({"base": better, "champion": better}, rules()).promote
    refused = decide({"base": better, "champion": worse}, rules())
    assert not refused.promote
    assert refused.reason == (
        "refused: CFM (unbiased), challenger minus champion: +0.0500, interval [-0.1000, +0.2000], "
        "must lie below +0.0000"
    )
    assert "(and 1 more)" in decide({"base": worse, "champion": worse}, rules()).reason


def test_guards_hold_against_every_reference() -> None:
    metrics = {"cfm": estimate(-0.3, -0.1), "ce": estimate(0.0, 0.1)}
    harmless = {**metrics, "ce": estimate(0.0, 0.01)}
    decision = decide({"base": metrics, "champion": harmless}, rules(guards={"ce": 0.05}))
    assert {(check.name, check.against) for check in decision.checks if not check.passed} == {
        ("guard", "base")
    }


@pytest.mark.parametrize("interval", [(math.nan, math.nan), (-0.3, math.nan), (math.nan, -0.1)])
def test_a_number_that_is_not_determined_passes_nothing(interval: tuple[float, float]) -> None:
    unsure = PairedEstimate(1.0, 0.5, -0.5, math.nan, interval, interval, interval, 1)
    sure = estimate(-0.3, -0.1)
    assert not decide({"base": {"cfm": unsure}}, rules()).promote
    assert not decide({"base": {"cfm": sure, "ce": unsure}}, rules(guards={"ce": 1e9})).promote


def test_of_one_document_nothing_is_determined() -> None:
    one = np.ones(1)
    measured = paired_bootstrap(2 * one, one, one, one, resamples=10, confidence=0.95, seed=0)
    assert measured.difference == -1.0
    decision = decide({"base": {"cfm": measured}}, rules())
    assert not decision.promote
    assert "do not determine" in decision.reason


def test_a_metric_that_was_not_measured_passes_nothing() -> None:
    decision = decide({"base": {"cfm": estimate(-0.3, -0.1)}}, rules(guards={"ce": 1.0}))
    assert not decision.promote
    assert "not measured" in decision.reason


def test_no_reference_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        decide({}, rules())


def test_json_and_back() -> None:
    metrics = {"cfm": estimate(-0.3, -0.1), "ce": estimate(-0.3, math.nan)}
    decision = decide({"base": metrics, "champion": metrics}, rules(guards={"ce": 0.1, "entropy": 0.1}))
    text = json.dumps(decision.to_json(), allow_nan=False)
    again = Decision.from_json(json.loads(text))
    assert again.to_json() == decision.to_json()
    assert math.isnan(again.checks[1].interval[1])
    with pytest.raises(ValueError, match="not a decision"):
        Decision.from_json({"schema": "else"})


@pytest.mark.parametrize(
    ("promotion", "key"),
    [
        ({"metric": "cmf"}, "promotion.metric"),
        ({"metric": "entropy"}, "promotion.metric"),  # neither direction is good in itself
        ({"guards": {"diversity": 0.1}}, "promotion.guards.diversity"),
        ({"metric": "tasks/code/pass@1"}, "promotion.metric"),  # no such task in the run file
        ({"guards": {"ce": -0.1}}, "promotion.guards.ce"),
        ({"champion_alias": "challenger"}, "publish.alias"),
    ],
)
def test_what_could_never_be_judged_is_refused_early(promotion: dict[str, object], key: str) -> None:
    with pytest.raises(UserErrors) as error:
        parse_config({**MINIMAL, "promotion": promotion})
    assert [problem.where for problem in error.value.errors] == [key]


def test_the_gate_needs_no_torch() -> None:
    code = "import sys, ebft_core.promotion; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
