"""The health rules: each fires on the series it is meant for, once per episode, and on no healthy one."""

from __future__ import annotations

import io
import logging
import logging.handlers
import queue
import random
import subprocess
import sys
from pathlib import Path

import pytest
from trainer_fixtures import make_config, make_trainer

from ebft_core.config import RunConfig, parse_config
from ebft_core.errors import UserError, UserErrors
from ebft_core.events import EventWriter, read_events
from ebft_core.health import Finding, HealthMonitor
from ebft_core.trainers.checkpoints import newest_checkpoint

WINDOW = 5
STRUCTURED = {
    "ebft": {"mode": "structured", "whitening": "none"},
    "data": {"transform": "prompt_completion"},
    "rollout": {"use_vllm": False, "max_staleness": 2},
}


def config(**overrides: object) -> RunConfig:
    sections = {"health": {"window": WINDOW}, "ebft": {"whitening": "feature"}, **overrides}
    return make_config(**sections)


def healthy(step: int) -> dict[str, float]:
    noise = random.Random(step)
    return {
        "ebft/entropy": noise.uniform(0.1, 0.5),
        "ebft/diversity": noise.uniform(0.01, 0.1),
        "ebft/zero_advantage_rate": noise.uniform(0.0, 0.3),
        "ebft/advantage_std": noise.uniform(0.1, 0.3),
        "ebft/duplicate_rate": noise.uniform(0.0, 0.1),
        "ebft/cfm": 0.5 + noise.gauss(0, 0.2) - 0.001 * step,
        "train/loss": noise.gauss(0, 1),
        "train/grad_norm": noise.uniform(0.1, 3),
        "policy_lag": 1.0,
        "rollout/effective_sample_size": noise.uniform(0.7, 1.0),
        "rollout/failed_prompts": 0.0,
    }


def findings(run: RunConfig, changed: dict[str, list[float]], *, before: int = 20) -> list[Finding]:
    """Warnings of a run that is healthy for `before` steps and then has these values, step by step."""
    monitor, found = HealthMonitor(run), []
    for step in range(1, before + 1 + max((len(v) for v in changed.values()), default=0)):
        values = healthy(step)
        for name, series in changed.items():
            if step > before:
                values[name] = series[step - before - 1]
        found += monitor.observe(step, values)
    return found


@pytest.mark.parametrize("sections", [{}, STRUCTURED], ids=["strided", "structured"])
def test_a_healthy_run_is_left_alone(sections: dict) -> None:
    assert findings(config(**sections), {}, before=400) == []


@pytest.mark.parametrize(
    ("metric", "value", "ailment", "after"),
    [
        ("ebft/entropy", 0.009, "collapse", WINDOW),
        ("ebft/diversity", 1.01, "collapse", WINDOW),
        ("ebft/zero_advantage_rate", 1.0, "no_signal", WINDOW),
        ("ebft/advantage_std", 0.0, "no_signal", WINDOW),
        ("train/grad_norm", 10.1, "divergence", 3),
        ("train/grad_norm", float("nan"), "divergence", 1),
        ("train/loss", float("inf"), "divergence", 1),
    ],
)
def test_a_value_out_of_its_range_is_reported_once(
    metric: str, value: float, ailment: str, after: int
) -> None:
    assert findings(config(), {metric: [value] * (after - 1)}) == []
    (found,) = findings(config(), {metric: [value] * 30})
    assert (found.ailment, found.step) == (ailment, 20 + after)
    assert metric in found.numbers
    assert "ebft." in found.fix or "trainer." in found.fix


@pytest.mark.parametrize(
    ("metric", "value", "ailment", "after"),
    [
        ("policy_lag", 3.0, "stale_policy", 1),
        ("rollout/effective_sample_size", 0.29, "stale_policy", WINDOW),
        ("rollout/failed_prompts", 1.0, "server", 1),
    ],
)
def test_ailments_of_structured_mode(metric: str, value: float, ailment: str, after: int) -> None:
    (found,) = findings(config(**STRUCTURED), {metric: [value] * 12})
    assert (found.ailment, found.step) == (ailment, 20 + after)


@pytest.mark.parametrize(
    ("metric", "value", "ailment"),
    [("ebft/cfm", 1.5, "divergence"), ("ebft/duplicate_rate", 0.6, "duplicates")],
)
def test_a_running_mean_far_above_its_best_is_reported(metric: str, value: float, ailment: str) -> None:
    (found,) = findings(config(), {metric: [value] * 20})
    assert found.ailment == ailment
    assert findings(config(), {metric: [value]}) == []  # one step is no trend


def test_what_is_normal_without_whitening_or_without_a_computed_position_is_no_collapse() -> None:
    raw = config(ebft={"whitening": "none"})
    assert findings(raw, {"ebft/diversity": [1.8] * 30}) == []
    assert findings(config(), {"ebft/entropy": [0.0] * 30}) == []


def test_an_episode_ends_after_a_whole_window_of_good_values() -> None:
    ill, well = [0.001] * WINDOW, [0.3]
    assert len(findings(config(), {"ebft/entropy": [*ill, *well, *ill]})) == 1
    assert len(findings(config(), {"ebft/entropy": [*ill, *well * 2 * WINDOW, *ill]})) == 2


def test_only_named_ailments_stop() -> None:
    for stop_on, stops in ((["divergence"], True), (["collapse"], False)):
        monitor = HealthMonitor(config(health={"stop_on": stop_on, "window": WINDOW}))
        monitor.observe(1, {"train/loss": float("nan")})
        assert (monitor.to_stop is not None) == stops


def test_the_names_of_ailments_are_checked() -> None:
    with pytest.raises(UserErrors, match=r"health\.stop_on"):
        config(health={"stop_on": ["divergance"]})


def test_the_rules_need_no_torch() -> None:
    code = "import ebft_core.health, sys; sys.exit('torch' in sys.modules or 'prefect' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# A gradient norm above 1e-9 in every step: the trainer's part, without waiting for a real ailment.
SICK = {"max_grad_norm": 1e-9, "grad_norm_steps": 2, "window": 2}


def test_training_warns_into_the_journal_and_goes_on(tmp_path: Path) -> None:
    journal = tmp_path / "train.jsonl"
    trainer = make_trainer(tmp_path / "c", make_config(health=SICK), events=EventWriter(journal, "train"))
    trainer.train()
    (warning,) = [e for e in read_events(journal) if e["kind"] == "warning"]
    assert (warning["name"], warning["step"]) == ("divergence", 2)
    assert "train/grad_norm" in warning["text"]
    assert warning["fix"] in warning["text"]
    assert trainer.state.global_step == 4


def test_training_told_to_stop_keeps_a_checkpoint_and_goes_on_where_it_is_told_not_to(tmp_path: Path) -> None:
    events = EventWriter(tmp_path / "train.jsonl", "train")
    run = make_config(health={**SICK, "window": 3, "grad_norm_steps": 3, "stop_on": ["divergence"]})
    with pytest.raises(UserError) as stopped:
        make_trainer(tmp_path / "c", run, events=events).train()
    assert "divergence" in stopped.value.what
    assert "health.stop_on=[]" in (stopped.value.hint or "")
    checkpoint = newest_checkpoint(tmp_path / "c")
    assert checkpoint is not None
    assert checkpoint.name.endswith("3")  # between the regular ones at 2 and 4

    with pytest.raises(UserError, match="divergence"):  # the same run again: not one step further
        make_trainer(tmp_path / "c", run, events=events).train(resume_from_checkpoint=str(checkpoint))
    steps = [e["step"] for e in read_events(tmp_path / "train.jsonl") if e["kind"] == "metrics"]
    assert steps == [1, 2, 3]

    resumed = make_trainer(tmp_path / "c", make_config(health=SICK), events=events)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 4
    assert len([e for e in read_events(tmp_path / "train.jsonl") if e["kind"] == "warning"]) == 1


def test_switched_off_it_says_nothing(tmp_path: Path) -> None:
    journal = tmp_path / "train.jsonl"
    run = make_config(health={**SICK, "enabled": False, "stop_on": ["divergence"]})
    make_trainer(tmp_path / "c", run, events=EventWriter(journal, "train")).train()
    assert [e["kind"] for e in read_events(journal)] == ["metrics"] * 4


def test_a_warning_is_shown_wherever_people_look(tmp_path: Path) -> None:
    from orchestration.builders import planned_run
    from rich.console import Console

    from flows.live_view import PlainView, open_view
    from tasks.report import build_report

    plan = planned_run(tmp_path)
    journal = plan.run_dir / "events" / "train.jsonl"
    finding = Finding("no_signal", 12, "ebft/advantage_std 0 (below 1e-06)", "raise ebft.temperature")
    EventWriter(journal, "train").warning(
        finding.text, name=finding.ailment, step=finding.step, numbers=finding.numbers, fix=finding.fix
    )
    (event,) = read_events(journal)
    for terminal in (False, True):
        console = Console(force_terminal=terminal, record=True, width=200, file=io.StringIO())
        with open_view(console) as view:
            assert isinstance(view, PlainView) != terminal
            view("train", event)
        assert f"train: warning: {finding.text}" in console.export_text()
    page = build_report(plan.run_dir)
    assert all(part in page for part in ("<h2>Health</h2>", "no signal", "below 1e-06", finding.fix))
    assert "<h2>Health</h2>" not in build_report(planned_run(tmp_path / "other").run_dir)


def test_a_warning_reaches_the_log_of_prefect() -> None:
    from tasks.stage_task import ProgressArtifact

    records: queue.Queue[logging.LogRecord] = queue.Queue()
    log = logging.Logger("a flow run")
    log.addHandler(logging.handlers.QueueHandler(records))
    ProgressArtifact("train", log)({"kind": "warning", "text": "divergence at step 3"})
    record = records.get_nowait()
    assert (record.levelname, record.getMessage()) == ("WARNING", "divergence at step 3")


def test_health_is_in_no_stage_key(tmp_path: Path) -> None:
    from orchestration.builders import micro_document

    from ebft_core.runs import plan_run

    document = micro_document(tmp_path)
    stops = parse_config({**document, "health": {"stop_on": ["divergence"], "window": 3}})
    keys = [[stage.key for stage in plan_run(run).stages] for run in (parse_config(document), stops)]
    assert keys[0] == keys[1]
