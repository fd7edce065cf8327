"""`data.exclude_hashes`: named documents are on neither side, and the file's content is part of the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ebft_core.config import RunConfig
from ebft_core.data.document import content_hash
from ebft_core.data.exclusion import digest_exclusion
from ebft_core.data.split import is_heldout
from ebft_core.data.store import read_document_hashes
from ebft_core.data.unseen import count_unseen
from ebft_core.errors import UserError
from ebft_core.runs import digest_inputs, plan_run
from ebft_core.stages import tokenize_data
from tests.data.builders import (
    base_stage,
    byte_tokenizer,
    data_config,
    run_config,
    stage_context,
    tiny_model,
    write_jsonl,
)

FRACTION = 0.3
TEXTS = [f"{number:02d}" + "x" * 40 for number in range(30)]
HASHES = [content_hash([text]) for text in TEXTS]
HELD = {key for key in HASHES if is_heldout(key, FRACTION)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("base")
    return base_stage(root / "stage", tiny_model(root / "model", byte_tokenizer()))


def config_of(folder: Path, hashes: list[str], **sections: Any) -> RunConfig:
    folder.mkdir(exist_ok=True)
    source = write_jsonl(folder / "texts.jsonl", [{"text": text} for text in TEXTS])
    names = folder / "hashes.txt"
    names.write_text("".join(f"{key}\n" for key in hashes), encoding="ascii")
    data = {"heldout_fraction": FRACTION, "exclude_hashes": str(names)}
    return run_config([str(source)], data=data, **sections)


def sides(config: RunConfig, base: Path, root: Path) -> tuple[dict[str, Any], set[str], set[str]]:
    context = stage_context(root, config, {"prepare_base": base})
    report = tokenize_data.run(context)
    found = (read_document_hashes(context.output / side) for side in ("train", "heldout"))
    return (report, *found)  # type: ignore[return-value]


def test_named_documents_are_on_neither_side(base: Path, tmp_path: Path) -> None:
    left_out = HASHES[:10]
    assert HELD & set(left_out)
    report, train, heldout = sides(config_of(tmp_path, left_out), base, tmp_path / "run")
    assert train == set(HASHES[10:]) - HELD
    assert heldout == HELD - set(left_out)
    assert (report["documents"], report["excluded"]) == (20, 10)


def test_without_own_heldout_rows_a_run_needs_frozen_ones(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no document falls into the held-out part"):
        sides(config_of(tmp_path, sorted(HELD)), base, tmp_path / "refused")
    frozen = config_of(tmp_path, sorted(HELD), evaluate={"heldout": "elsewhere"})
    _, train, heldout = sides(frozen, base, tmp_path / "run")
    assert (train, heldout) == (set(HASHES) - HELD, set())


def test_nothing_left_is_said(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the sources hold no other document") as caught:
        sides(config_of(tmp_path, HASHES), base, tmp_path / "run")
    assert "30 of them in data.exclude_hashes" in str(caught.value.value)


def test_the_content_of_the_file_changes_the_key_and_its_place_does_not(tmp_path: Path) -> None:
    model = {"from_scratch": {"sources": ["stdlib:abc.py"]}}

    def key(folder: str, hashes: list[str]) -> str:
        config = config_of(tmp_path, hashes, model=model)
        moved = tmp_path / folder
        Path(config.data.exclude_hashes or "").rename(moved)
        data = config.data.model_copy(update={"exclude_hashes": str(moved)})
        config = config.model_copy(update={"data": data})
        assert plan_run(config).stage("prepare_base").key
        return f"{plan_run(config).stage('tokenize').key} {digest_inputs(config)}"

    assert key("a", HASHES[:2]) == key("b", HASHES[1::-1])
    assert key("a", HASHES[:2]) != key("a", HASHES[:3])


def test_bad_files_are_refused(tmp_path: Path) -> None:
    absent = data_config(exclude_hashes=str(tmp_path / "absent"))
    with pytest.raises(UserError, match="cannot be read"):
        digest_exclusion(absent)
    (tmp_path / "names").write_text(f"{HASHES[0]}\nreport.txt\n", encoding="ascii")
    with pytest.raises(UserError, match="not a document hash") as caught:
        digest_exclusion(data_config(exclude_hashes=str(tmp_path / "names")))
    assert str(caught.value.where).endswith("names:2")


@pytest.mark.parametrize("known", [0, 10, len(HASHES)])
def test_documents_left_to_train_on_are_those_of_the_training_side(tmp_path: Path, known: int) -> None:
    left = set(HASHES[known:]) - HELD
    assert count_unseen(config_of(tmp_path, HASHES[:known])) == len(left)
    assert bool(left) is (known < len(HASHES))
