"""The files in `configs/` load, their JSON Schema is current, and so is the reference page."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from ebft_core.config import load_config
from ebft_core.config.loading import config_advice, dump_yaml
from ebft_core.config.reference import reference_text
from ebft_core.config.schema_view import leaf_paths, run_schema, schema_text
from ebft_core.config.yaml_reader import read_document

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "configs").glob("*.yaml"))
NAMED_BY_THE_ISSUE = {
    "quickstart",
    "strided-code-lora",
    "strided-code-full",
    "strided-prompt-completion",
    "strided-chat",
    "paper-qa-code",
    "paper-unstructured-code",
    "paper-translation",
    "quickstart-structured",
    "structured-qa-lora",
    "structured-async",
    "structured-chat-multiturn",
    "structured-reasoning",
    "structured-novllm",
}


def test_the_promised_files_are_there() -> None:
    assert {file.stem for file in FILES} >= NAMED_BY_THE_ISSUE


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
class TestEveryFile:
    def test_loads_without_advice_under_its_own_name(self, file: Path) -> None:
        config = load_config(file)
        assert config.name == file.stem
        assert config_advice(config) == []

    def test_has_the_editor_header(self, file: Path) -> None:
        assert file.read_text().splitlines()[0] == "# yaml-language-server: $schema=./schema.json"

    def test_satisfies_the_json_schema(self, file: Path) -> None:
        jsonschema.validate(read_document(file.read_text(), file.name).data, run_schema())

    def test_survives_a_dump(self, file: Path, tmp_path: Path) -> None:
        config = load_config(file)
        (tmp_path / "again.yaml").write_text(dump_yaml(config))
        assert load_config(tmp_path / "again.yaml") == config


@pytest.mark.parametrize(
    ("name", "geometry", "pooling"),
    [
        ("paper-qa-code", (8, 8, 8), "last_token"),
        ("paper-unstructured-code", (8, 8, 8), "last_token"),
        ("paper-translation", (2, 4, 4), "mean_pooling"),
    ],
)
def test_the_recipes_of_the_paper(name: str, geometry: tuple[int, int, int], pooling: str) -> None:
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    ebft, trainer = config.ebft, config.trainer
    assert (ebft.stride, ebft.context_length, ebft.generate_max_len) == geometry
    assert (ebft.embed_method, ebft.whitening, ebft.alignment_coef) == (pooling, "feature", 1.0)
    assert (trainer.learning_rate, trainer.lr_scheduler, trainer.warmup_ratio) == (1e-6, "constant", 0.03)
    assert (trainer.batch_size, config.lora) == (16, None)


def test_schema_file_is_current() -> None:
    current = (ROOT / "configs" / "schema.json").read_text(encoding="utf-8")
    assert current == schema_text(), "run `ebft schema --output configs/schema.json`"


def test_schema_is_a_valid_json_schema_that_refuses_unknown_keys() -> None:
    schema = json.loads(schema_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    data = {"model": {"name_or_path": "m"}, "data": {"sources": [{"path": "a"}]}, "ebft": {"strid": 1}}
    with pytest.raises(jsonschema.ValidationError, match="strid"):
        jsonschema.validate(data, schema)


def test_reference_page_is_current() -> None:
    current = (ROOT / "docs" / "config-reference.md").read_text(encoding="utf-8")
    assert current == reference_text(), "run `ebft reference --output docs/config-reference.md`"


def test_reference_page_explains_every_key() -> None:
    rows = [line.split(" | ") for line in reference_text().splitlines() if line.startswith("| `")]
    assert len(rows) == sum(len(paths) for paths in leaf_paths().values())
    assert all(row[3].strip(" |") for row in rows)
