"""What retraining decides without MLflow: what is new, what a run is changed to, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ebft_core import runs
from ebft_core.config import RunConfig, load_config, parse_config
from ebft_core.data.exclusion import read_exclusion
from ebft_core.errors import UserError
from ebft_core.retrain import (
    Continuation,
    apply_changes,
    changes_for,
    check_retrainable,
    fingerprint,
    line_folders,
    references_for,
    write_exclusion,
)

FOUND = Continuation(Path("/w/base"), Path("/w/champion"), Path("/w/heldout"), Path("/w/excluded.txt"))
REFUSED_AT_FIRST = Continuation(base=Path("/w/base"), heldout=Path("/w/heldout"))


def document(folder: Path, **sections: Any) -> dict[str, Any]:
    (folder / "text").mkdir(exist_ok=True)
    for number in range(3):
        (folder / "text" / f"{number}.txt").write_text(f"text {number}", encoding="utf-8")
    return {
        "name": "line",
        "workspace": str(folder / "workspace"),
        "model": {"from_scratch": {"sources": ["stdlib:abc.py"]}},
        "data": {"sources": [{"path": str(folder / "text" / "*.txt")}], "sequence_length": 64},
        "evaluate": {"against": {"other": "/w/other"}},
        **sections,
    }


def config_of(folder: Path, **sections: Any) -> RunConfig:
    return parse_config(document(folder, **{"evaluate": {}, **sections}))


def add_text(folder: Path) -> None:
    (folder / "text" / "3.txt").write_text("new", encoding="utf-8")


def edit_text(folder: Path) -> None:
    (folder / "text" / "0.txt").write_text("TEXT 0", encoding="utf-8")  # as long as before


@pytest.mark.parametrize("change", [add_text, edit_text])
def test_other_bytes_are_news(tmp_path: Path, change: Callable[[Path], None]) -> None:
    config = config_of(tmp_path)
    before = fingerprint(config)
    assert fingerprint(config) == before
    change(tmp_path)
    assert fingerprint(config) != before


@pytest.mark.parametrize(
    ("sections", "news"),
    [
        ({"trainer": {"learning_rate": 1e-4}}, True),
        ({"model": {"from_scratch": {"sources": ["stdlib:ast.py"]}}}, True),
        ({"evaluate": {"n_samples": 8}}, True),
        ({"retrain": {"start_from": "base"}}, True),
        ({"promotion": {"margin": 0.1}}, False),
        ({"trainer": {"save_every": 7}}, False),
        ({"storage": {"parallel": 2}}, False),
        ({"tracking": {"experiment": "other"}}, False),
    ],
)
def test_settings_are_news_if_they_shape_a_judged_model(
    tmp_path: Path, sections: dict[str, Any], news: bool
) -> None:
    changed = fingerprint(config_of(tmp_path, **sections))
    assert (changed != fingerprint(config_of(tmp_path))) is news


def test_an_update_of_the_code_is_no_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    before, key = fingerprint(config), runs.plan_run(config).run_key
    monkeypatch.setattr(runs, "code_digest", lambda: "0" * 64)
    assert runs.plan_run(config).run_key != key
    assert fingerprint(config) == before


def changed(folder: Path, found: Continuation, **sections: Any) -> RunConfig:
    """The changed run, which must be the same by both ways of giving it to a flow."""
    content = document(folder, **sections)
    file = folder / "line.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    changes = changes_for(parse_config(content), found)
    path, overrides = apply_changes(str(file), ["trainer.max_steps=5"], changes)
    content["trainer"] = {"max_steps": 5}
    result, none = apply_changes(content, [], changes)
    assert isinstance(path, str)
    assert isinstance(result, dict)
    assert none == []
    config = load_config(path, overrides)
    assert config == parse_config(result)
    assert content == {**document(folder, **sections), "trainer": {"max_steps": 5}}  # not changed itself
    return config


def test_the_first_run_is_the_run_file(tmp_path: Path) -> None:
    config = changed(tmp_path, Continuation())
    assert config == parse_config({**document(tmp_path), "trainer": {"max_steps": 5}})
    assert references_for(config, Continuation()) == {"base": None}


def test_a_run_goes_on_from_the_champion_and_is_compared_with_the_first_base(tmp_path: Path) -> None:
    config = changed(tmp_path, FOUND)
    assert (config.model.name_or_path, config.model.from_scratch) == ("/w/champion", None)
    assert config.evaluate.against == {"other": "/w/other", "base": "/w/base"}
    assert config.evaluate.feature_model == "/w/base"
    assert (config.evaluate.heldout, config.data.exclude_hashes) == ("/w/heldout", "/w/excluded.txt")
    assert references_for(config, FOUND) == {"base": "base", "champion": None}


def test_a_run_begins_at_the_base_and_is_compared_with_the_champion(tmp_path: Path) -> None:
    config = changed(tmp_path, FOUND, retrain={"start_from": "base"})
    assert config.model.from_scratch is not None
    assert config.evaluate.against == {"other": "/w/other", "champion": "/w/champion"}
    assert (config.evaluate.feature_model, config.evaluate.heldout) == (None, "/w/heldout")
    assert references_for(config, FOUND) == {"base": None, "champion": "champion"}


def test_after_a_refused_first_model_the_held_out_rows_stay(tmp_path: Path) -> None:
    config = changed(tmp_path, REFUSED_AT_FIRST)
    assert config.model.from_scratch is not None
    assert (config.evaluate.heldout, config.evaluate.against) == ("/w/heldout", {"other": "/w/other"})
    assert references_for(config, REFUSED_AT_FIRST) == {"base": None}


def test_documents_of_the_run_file_stay_left_out(tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("a" * 32 + "\n", encoding="ascii")
    given = document(tmp_path, evaluate={})
    given["data"]["exclude_hashes"] = str(own)
    config = parse_config(given)
    path = write_exclusion(config, line_folders(config), {"b" * 32})
    again = config.data.model_copy(update={"exclude_hashes": str(path)})
    assert read_exclusion(again) == {"a" * 32, "b" * 32}
    assert path.is_relative_to(tmp_path / "workspace" / "retrain" / "line")


@pytest.mark.parametrize(
    ("sections", "where"),
    [
        ({"publish": {"enabled": False}}, "publish.enabled"),
        ({"evaluate": {"heldout": "x"}}, "evaluate.heldout"),
        ({"evaluate": {"feature_model": "x"}}, "evaluate.feature_model"),
        ({"evaluate": {"against": {"champion": "x"}}}, "evaluate.against.champion"),
    ],
)
def test_what_retraining_cannot_use_is_refused(tmp_path: Path, sections: dict[str, Any], where: str) -> None:
    check_retrainable(config_of(tmp_path))
    with pytest.raises(UserError) as caught:
        check_retrainable(config_of(tmp_path, **sections))
    assert caught.value.where == where


def test_new_documents_alone_need_the_champion(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="would never learn from the older documents"):
        config_of(tmp_path, retrain={"train_on": "new", "start_from": "base"})
