"""The journal: complete lines only, nothing lost, whatever kills the writer."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path

from ebft_core.events import EventReader, EventWriter, read_events


def test_every_kind_is_read_back(tmp_path: Path) -> None:
    journal = tmp_path / "events" / "train.jsonl"
    events = EventWriter(journal, "train")
    events.metrics(3, {"ebft/cfm": 0.5, "bad": math.nan, "worse": -math.inf}, total=10)
    events.progress("load", 1, 4, "files")
    events.phase("train")
    events.message("größer")
    events.samples(3, [{"text": "a"}])
    events.error({"what": "x"})
    found = read_events(journal)
    assert [e["kind"] for e in found] == ["metrics", "progress", "phase", "message", "samples", "error"]
    assert all(e["stage"] == "train" and e["time"] > 1e9 for e in found)
    values = {name: float(value) for name, value in found[0]["values"].items()}
    assert values["ebft/cfm"] == 0.5
    assert math.isnan(values["bad"])
    assert values["worse"] == -math.inf
    for line in journal.read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name)))  # strict JSON


def test_a_reader_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    reader = EventReader(journal)
    assert list(reader.read()) == []
    journal.write_bytes(b'{"kind": "message", "text": "one"}\n{"kind": "mess')
    assert [e["text"] for e in reader.read()] == ["one"]
    assert list(reader.read()) == []
    with open(journal, "ab") as stream:
        stream.write(b'age", "text": "two"}\n')
    assert [e["text"] for e in reader.read()] == ["two"]


def test_a_line_torn_by_a_kill_costs_only_itself(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    EventWriter(journal, "train").message("before")
    with open(journal, "ab") as stream:
        stream.write(b'{"kind": "message", "te')
    EventWriter(journal, "train").message("after")
    assert [e["text"] for e in read_events(journal)] == ["before", "after"]


def test_a_killed_writer_leaves_every_finished_event(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    pid = os.fork()
    if pid == 0:
        events = EventWriter(journal, "train")
        for step in range(100):
            events.metrics(step, {"x": float(step)})
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert [e["step"] for e in read_events(journal)] == list(range(100))


def test_without_a_path_events_are_dropped() -> None:
    EventWriter(None, "train").metrics(1, {"x": 1.0})
