"""What a terminal, a log file and a machine are shown while a run goes on."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console

from ebft_core.errors import UserError
from flows.json_logs import JsonView, write_note
from flows.live_view import LiveView, open_view
from flows.plain_view import PlainView
from flows.vitals import VITALS, Vitals, duration, trend
from tests.docs_pages import page_text, table_rows

STEP = {
    "ebft/reward": 0.25,
    "ebft/alignment": 0.5,
    "ebft/entropy": 1.25,
    "perf/step_seconds": 2.0,
    "perf/rollout_seconds": 1.0,
    "perf/features_seconds": 0.25,
    "perf/update_seconds": 0.5,
    "perf/peak_memory_mb": 512.0,
    "rollout/tokens_per_second": 1234.0,
}
SAMPLES = {
    "kind": "samples",
    "step": 1,
    "rows": [
        {"context": "def f(x):\n    ", "ground_truth": "return x", "sample": "return [red]y", "reward": 0.5},
        {"context": "def f(x):\n    ", "ground_truth": "return x", "sample": "pass", "reward": -0.25},
    ],
}


def metrics(step: int, total: int | None = 10, **values: float | str) -> dict[str, Any]:
    return {"kind": "metrics", "step": step, "total": total, "values": {**STEP, **values}}


def terminal(width: int = 140, height: int = 24) -> Console:
    return Console(force_terminal=True, record=True, width=width, height=height, file=io.StringIO())


def shown(view: LiveView, console: Console) -> str:
    """The view once; the console itself has its frames on top of each other."""
    paper = terminal(console.width, console.height)
    paper.print(view)
    return paper.export_text()


def lines_with(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if word in line]


def feed(console: Console, *events: Mapping[str, Any]) -> str:
    with open_view(console) as view:
        assert isinstance(view, LiveView)
        for event in events:
            view("train", event)
        return shown(view, console)


def test_the_live_view_shows_step_speed_time_left_memory_and_phases() -> None:
    text = feed(terminal(), metrics(4))
    assert "4/10" in text
    assert "2 s/step  12 s left  1,234 tokens/s  0.50 GiB" in text
    assert "rollout 50%, features 12%, update 25%" in text


def test_the_live_view_shows_values_with_arrows_and_healthy_ranges() -> None:
    rising = [metrics(step, **{"ebft/reward": step / 10}) for step in range(1, 9)]
    text = feed(terminal(), *rising)
    (reward,) = lines_with(text, "reward")
    assert "0.8" in reward
    assert "▲" in reward
    assert "e-17" not in feed(terminal(), metrics(1, **{"ebft/diversity": -2.5e-17}))
    (alignment,) = lines_with(text, "alignment")
    assert "→" in alignment
    assert "healthy 0.3 to 0.9, rising" in alignment
    assert not lines_with(text, "CFM")  # this run has none


def test_rollouts_stand_beside_the_vitals_below_them_or_nowhere() -> None:
    wide, high, small = terminal(140, 24), terminal(90, 50), terminal(90, 24)
    texts = [feed(console, metrics(1), SAMPLES) for console in (wide, high, small)]
    for text in texts[:2]:
        assert all(part in text for part in ("rollouts of step 1", "return [red]y", "+0.500", "-0.250"))
    assert len(texts[0].splitlines()) < len(texts[1].splitlines())
    assert "rollouts of step 1" not in texts[2]


def test_what_a_model_writes_cannot_steer_the_terminal() -> None:
    row = {"context": "a\tb\x9f", "ground_truth": "c\rd", "sample": "\x1b[2Je\x07", "reward": 0.0}
    text = feed(terminal(), metrics(1), {"kind": "samples", "step": 1, "rows": [row]})
    assert all(part in text for part in ("a   b�", "c�d", "�[2Je�"))
    assert not set(text) & set("\x1b\x07\x9f\r\t")


def test_a_warm_start_has_vitals_of_its_own() -> None:
    values = {"sft/loss": 2.5, "sft/token_accuracy": 0.4, "sft/step_seconds": 3.0, "sft/peak_memory_mb": 2048}
    text = feed(terminal(), {"kind": "metrics", "step": 2, "total": 4, "values": values})
    assert "3 s/step  6 s left  2.00 GiB" in text
    assert "token accuracy  0.4" in text


def test_a_stage_that_begins_again_begins_at_nothing() -> None:
    console = terminal()
    text = feed(console, metrics(7), SAMPLES, {"kind": "done"}, {"kind": "started"}, metrics(1))
    assert "1/10" in text
    assert "7/10" not in text
    assert "rollouts of step" not in text


def test_an_evaluation_between_two_steps_moves_no_bar() -> None:
    evaluation = {"kind": "metrics", "step": 4, "total": None, "values": {"eval/ce": 2.0}}
    assert "4/10" in feed(terminal(), metrics(4), evaluation)


def test_without_a_terminal_there_are_plain_lines() -> None:
    console = Console(force_terminal=False, width=60, file=io.StringIO())
    with open_view(console) as view:
        assert isinstance(view, PlainView)
        view("train", {"kind": "started"})
        view("train", metrics(10))
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "train: started",
        "train: 10/10 reward 0.250  alignment 0.500  2 s/step  0 s left  1,234 tokens/s  0.50 GiB",
    ]


def test_json_logs_are_the_events_one_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    view = JsonView()
    event = {"time": 1.5, "stage": "train", **metrics(1, **{"train/loss": "nan"})}
    with view.waiting("starting Prefect"):
        view("train", event)
    view("train", {"kind": "done"})
    view.refused(UserError("no such file", where="data.sources", value="ä\n"))
    write_note("result", places={"report": "r.html"})
    first, second, third, refusal, result = map(json.loads, capsys.readouterr().out.splitlines())
    assert second == event
    assert (first["stage"], first["kind"], first["text"]) == (None, "message", "starting Prefect")
    assert (third["stage"], third["kind"]) == ("train", "done")
    assert refusal["error"]["where"] == "data.sources"
    assert result["places"] == {"report": "r.html"}
    assert all(line["time"] > 1 for line in (first, third, refusal, result))


@pytest.mark.parametrize(
    ("values", "arrow"),
    [
        ([1.0, 2.0, 3.0], "→"),  # too few to say
        ([1, 1, 1, 2, 2, 2], "▲"),
        ([2, 2, 2, 1, 1, 1], "▼"),
        ([0, 10, 0, 10, 1, 11, 1, 11], "→"),  # the noise is larger than the change
        ([5.0] * 20, "→"),
    ],
)
def test_an_arrow_needs_more_than_chance(values: list[float], arrow: str) -> None:
    assert trend(tuple(values)) == arrow


def test_better_and_worse_follow_the_metric_not_the_arrow() -> None:
    vitals = Vitals()
    for step in range(8):
        vitals.feed(metrics(step, **{name: float(step) for name in ("ebft/cfm", "ebft/entropy")}))
    readings = {reading.vital.metric: reading for reading in vitals.readings()}
    assert readings["ebft/cfm"].improves is False
    assert readings["ebft/entropy"].improves is None
    assert readings["ebft/reward"].improves is None
    assert readings["ebft/alignment"].inside is True
    assert readings["ebft/entropy"].inside is False


def test_values_that_are_no_numbers_are_shown_and_enter_no_trend() -> None:
    text = feed(terminal(), *(metrics(s, **{"ebft/reward": "nan"}) for s in range(8)))
    (reward,) = lines_with(text, "reward")
    assert "nan" in reward


@pytest.mark.parametrize(("seconds", "text"), [(42, "42 s"), (425, "7 min"), (11100, "3 h 05 min")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_directions_and_ranges_are_those_of_the_guide() -> None:
    rows = {row[0].strip("`"): row for row in table_rows(page_text("metrics.md"), "## Training")}
    directions = {"higher": "up", "lower": "down", None: "none"}
    for vital in VITALS:
        if vital.metric not in rows:
            continue
        _, _, _, direction, healthy = rows[vital.metric]
        assert direction == directions[vital.better], vital.metric
        if vital.healthy is not None:
            assert "{:g}-{:g}".format(*vital.healthy) in healthy.replace("–", "-"), vital.metric  # noqa: RUF001
