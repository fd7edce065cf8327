"""The stage as a whole: real text in, rows on disk out, and every kind of bad input refused."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from ebft_core.config import RunConfig
from ebft_core.data.sources import digest_sources
from ebft_core.data.store import read_rows
from ebft_core.errors import UserError, UserErrors
from ebft_core.events import read_events
from ebft_core.manifests import digest_files
from ebft_core.rows import row_anchors
from ebft_core.stage_runner import Preempted
from ebft_core.stages import tokenize_data
from tests.data.builders import (
    base_stage,
    byte_tokenizer,
    run_config,
    stage_context,
    tiny_model,
    write_jsonl,
)

STDLIB = Path(sysconfig.get_paths()["stdlib"])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("base")
    return base_stage(root / "stage", tiny_model(root / "model", byte_tokenizer()))


def run(config: RunConfig, base: Path, root: Path) -> tuple[dict[str, Any], Path]:
    context = stage_context(root, config, {"prepare_base": base})
    return tokenize_data.run(context), context.output


def documents_of(output: Path, side: str) -> dict[str, bytes]:
    """Hash -> the bytes of all rows with that hash, joined."""
    found: dict[str, list[int]] = {}
    for row in read_rows(output / side):
        ids = iter(row["input_ids"])
        for length, key in zip(row["document_lengths"], row["document_hashes"], strict=True):
            found.setdefault(key, []).extend(next(ids) for _ in range(length))
    return {key: bytes(i for i in ids if i < 256) for key, ids in found.items()}


@pytest.mark.parametrize("packing", [False, True])
def test_standard_library_text_arrives_byte_by_byte(base: Path, tmp_path: Path, packing: bool) -> None:
    config = run_config(["stdlib:encodings/*.py"], data={"packing": packing, "sequence_length": 512})
    report, output = run(config, base, tmp_path)
    originals = [p.read_bytes() for p in sorted((STDLIB / "encodings").glob("*.py"))]
    train, heldout = documents_of(output, "train"), documents_of(output, "heldout")
    assert not set(train) & set(heldout)
    stored = [*train.values(), *heldout.values()]
    assert len(stored) == len(originals)
    for original in originals:  # only a last piece without room for context and target may be left out
        assert any(original.startswith(text) and len(original) - len(text) < 16 for text in stored)
    assert report["documents"] == len(originals)
    assert report["train"]["documents"] == len(train)
    assert json.loads((output / "data.json").read_text()) == report
    assert not (output / "quarantine.jsonl").exists()
    kinds = {
        (e["phase"], e["done"] == e["total"])
        for e in read_events(tmp_path / "events.jsonl")
        if e["kind"] == "progress"
    }
    assert ("tokenizing", True) in kinds


def test_every_row_has_an_anchor_and_two_runs_agree(base: Path, tmp_path: Path) -> None:
    config = run_config(["stdlib:json/*.py"], data={"heldout_fraction": 0.4})
    first, output = run(config, base, tmp_path / "a")
    for side in ("train", "heldout"):
        assert all(len(row_anchors(row, config)) for row in read_rows(output / side))
    second, again = run(config, base, tmp_path / "b")
    assert first == second
    files = [p.relative_to(output) for p in output.rglob("*") if p.is_file()]
    assert digest_files(output / f for f in files) == digest_files(again / f for f in files)


def rows_of_text(count: int, length: int = 40) -> list[dict[str, str]]:
    return [{"text": f"{i:03d}" + "x" * (length - 3)} for i in range(count)]


def test_bad_rows_fail_with_their_places_and_count(base: Path, tmp_path: Path) -> None:
    rows: list[Any] = rows_of_text(30)
    rows[1:1] = [{"text": None}] * 25
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserErrors) as caught:
        run(run_config([str(path)]), base, tmp_path / "run")
    text = caught.value.render()
    assert "25 of 55 rows cannot be used" in text
    assert f"{path}:2" in text
    assert f"{path}:21" in text
    assert f"{path}:22" not in text
    assert caught.value.where == "data.bad_rows"


def test_quarantine_keeps_a_file_up_to_the_rate(base: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*rows_of_text(38), {"text": 1}, {"text": ""}])
    data = {"bad_rows": "quarantine", "max_bad_fraction": 0.05}
    report, output = run(run_config([str(path)], data=data), base, tmp_path / "in")
    lines = [json.loads(line) for line in (output / "quarantine.jsonl").read_text().splitlines()]
    assert [line["origin"] for line in lines] == [f"{path}:39", f"{path}:40"]
    assert (report["documents"], report["quarantined"]) == (38, 2)
    with pytest.raises(UserErrors, match="2 of 40 rows") as caught:
        run(run_config([str(path)], data={**data, "max_bad_fraction": 0.049}), base, tmp_path / "out")
    assert caught.value.where == "data.max_bad_fraction"


def test_rows_that_fail_only_when_tokenized_follow_the_same_policy(base: Path, tmp_path: Path) -> None:
    rows = [[("user", f"{i:020d}"), ("assistant", "a" * 20)] for i in range(30)]
    rows += [[("user", "bad"), ("assistant", "a" * 20)], [("user", "q" * 80), ("assistant", "a" * 20)]]
    records = [{"messages": [{"role": r, "content": c} for r, c in row]} for row in rows]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% if messages[0].content == 'bad' %}{{ raise_exception('no') }}{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    model = {"name_or_path": "unused", "chat_template": str(template)}
    with pytest.raises(UserErrors, match="1 of 32 rows"):
        run(run_config([str(path)], model=model, data={"transform": "chat"}), base, tmp_path / "fail")
    data = {"transform": "chat", "bad_rows": "quarantine", "max_bad_fraction": 0.1}
    report, output = run(run_config([str(path)], model=model, data=data), base, tmp_path / "keep")
    assert (report["documents"], report["quarantined"], report["dropped_documents"]) == (31, 1, 1)
    row = read_rows(output / "train")[0]
    spoken = bytes(i for i, label in zip(row["input_ids"], row["labels"], strict=True) if label >= 0)
    assert spoken == b"a" * 20 + b"\n"
    assert row["prompt_lengths"] == [len("user: \nassistant: ") + 20]


def test_an_absent_column_names_the_columns_found(base: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": "x", "a": "y"}] * 3)
    with pytest.raises(UserError, match="no row has the column `completion` or") as caught:
        run(
            run_config([str(path)], data={"transform": "prompt_completion", "fields": {"prompt": "q"}}),
            base,
            tmp_path / "r",
        )
    assert caught.value.where == "data.fields.completion"
    assert "a, q" in str(caught.value.expected)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (rows_of_text(20, length=10), "every document is too short"),
        ([], "no document"),
        (rows_of_text(1), "no document falls into"),
    ],
)
def test_sources_without_use(base: Path, tmp_path: Path, rows: list, message: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError, match=message):
        run(run_config([str(path)]), base, tmp_path / "run")


def test_no_data_files(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no data files"):
        run(run_config([str(tmp_path / "*.txt")]), base, tmp_path / "run")


def test_short_pieces_are_counted(base: Path, tmp_path: Path) -> None:
    rows = [*rows_of_text(20, 70), *rows_of_text(5, 10)]  # 71 tokens = 64 + 7; 11 tokens; 16 are needed
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    report, output = run(run_config([str(path)]), base, tmp_path / "run")
    assert (report["dropped_too_short"], report["dropped_documents"]) == (25, 5)
    assert {len(row["input_ids"]) for row in read_rows(output / "train")} == {64}


def test_ids_beyond_the_embedding(tmp_path: Path) -> None:
    small = base_stage(tmp_path / "stage", tiny_model(tmp_path / "model", byte_tokenizer(), vocab_size=100))
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"text": "A" * 40 + str(i) + ("z" if i == 7 else "")} for i in range(20)]
    )
    data = {"append_eos": False}
    with pytest.raises(UserError, match="beyond the model's embedding") as caught:
        run(run_config([str(path)], data=data), small, tmp_path / "run")
    assert caught.value.where == f"{path}:8"
    assert "122 (z)" in str(caught.value.value)


def test_max_documents_takes_the_first(base: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", rows_of_text(40))
    _, output = run(run_config([str(path)], data={"max_documents": 25}), base, tmp_path / "run")
    texts = {*documents_of(output, "train").values(), *documents_of(output, "heldout").values()}
    assert texts == {row["text"].encode() for row in rows_of_text(25)}


def test_a_stop_request_ends_the_stage(base: Path, tmp_path: Path) -> None:
    context = stage_context(tmp_path, run_config(["stdlib:json/*.py"]), {"prepare_base": base})
    context.stop.request("test")
    with pytest.raises(Preempted):
        tokenize_data.run(context)
    assert list(context.output.iterdir()) == []


def test_data_that_changes_under_way_is_noticed(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", rows_of_text(30))
    config = run_config([str(path)])
    context = stage_context(tmp_path / "run", config, {"prepare_base": base})
    planned = digest_sources(config.data.sources)
    (context.run_dir / "plan.json").write_text("{}")

    class Plan:
        data_digest = planned

    monkeypatch.setattr(tokenize_data, "read_plan", lambda run_dir: Plan)
    tokenize_data.run(context)
    write_jsonl(path, rows_of_text(31))
    again = stage_context(tmp_path / "again", config, {"prepare_base": base})
    (again.run_dir / "plan.json").write_text("{}")
    with pytest.raises(UserError, match="the data changed"):
        tokenize_data.run(again)
