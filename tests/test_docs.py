"""The user guide is built, its commands and examples run, and what it names exists."""

from __future__ import annotations

import ast
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from rich.console import Console

from ebft_core.config import load_config, parse_config
from ebft_core.config.legacy import advise
from ebft_core.config.legacy_names import NOT_NEEDED, RENAMED
from ebft_core.config.schema_view import keys_at, node_at
from ebft_core.config.yaml_reader import read_document
from ebft_core.data.preview import preview
from ebft_core.metrics import METRICS as EVALUATION_METRICS
from ebft_core.trainers.metrics import StepSums
from ebft_core.trainers.update import RatioSums
from flows.cli import app
from tests.docs_pages import (
    DOCS,
    GUIDE,
    PAGES,
    ROOT,
    blocks,
    command_lines,
    inline_code,
    page_text,
    table_rows,
)
from tests.test_trainer import METRICS as TRAINING_METRICS

MINIMAL = {"model": {"name_or_path": "m"}, "data": {"sources": [{"path": "a.txt"}]}}
SOURCES = ("ebft_core", "tasks", "flows")
FOREIGN_MESSAGES = {"CUDA out of memory"}  # PyTorch's, not ours


def test_the_guide_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    pages = {path.name for path in (tmp_path / "site").glob("*.html")}
    assert {Path(name).with_suffix(".html").name for name in PAGES} <= pages


def test_built_pages_load_nothing_from_other_hosts(tmp_path: Path) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site")))
    for page in (tmp_path / "site").rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]+)"', html)
        loaded += re.findall(r'<link[^>]* rel="stylesheet"[^>]* href="([^"]+)"', html)
        assert not [url for url in loaded if "//" in url], page.name


def _pages_that_run() -> list[str]:
    return [name for name in GUIDE if any(block.mark == "run" for block in blocks(name))]


@pytest.mark.parametrize("name", _pages_that_run())
def test_marked_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a page run in order in one fresh folder that holds the shipped configurations."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    namespace: dict[str, object] = {"__name__": "example"}
    for block in blocks(name):
        if block.mark == "file":
            Path(block.argument).write_text(block.text, encoding="utf-8")
        elif block.mark == "run" and block.language == "python":
            exec(compile(block.text, f"{name} (example)", "exec"), namespace)
        elif block.mark == "run":
            result = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.text],
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert result.returncode == int(block.argument or 0), result.stdout + result.stderr


def test_the_custom_transform_of_the_guide_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ebft_core.data.transforms import get_transform
    from ebft_core.scratch.tokenizer import make_tokenizer

    (block,) = [b for b in blocks("data-formats.md") if b.argument == "my_format.py"]
    (tmp_path / "my_format.py").write_text(block.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = parse_config({**MINIMAL, "model": {"from_scratch": {"sources": ["stdlib:abc.py"]}}})
    tokenizer = make_tokenizer(config.model.from_scratch, [])
    transform = get_transform("my_format:title_and_body")
    good, bad = transform.tokenize([{"title": "T", "body": "body"}, {"title": "T"}], tokenizer, config.data)
    assert bytes(good.input_ids.tolist()) == b"T\nbody"
    assert (good.prompt_length, good.is_target.tolist()) == (2, [False] * 2 + [True] * 4)
    assert str(bad) == "no body"


def test_the_chat_example_is_read_as_the_guide_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks("data-formats.md"):
        if block.mark == "file":
            Path(block.argument).write_text(block.text, encoding="utf-8")
    (command,) = [
        line for line in command_lines("data-formats.md") if "chats.jsonl" in line and "--set" in line
    ]
    overrides = [word for word in shlex.split(command) if "=" in word]
    config = load_config(tmp_path / "pairs.yaml", [*overrides, "data.chat.supervise_thinking=false"])
    console = Console(record=True, width=120, file=io.StringIO())
    preview(config, rows=1, console=console)
    shown = console.export_text()
    answer = "<think>two and two</think>It is 4, as everybody knows.<|end|>"
    thought = "<think>two and two</think>"
    assert f"{len(answer) - len(thought)} supervised" in shown
    assert shown.replace("▸", "").count(answer) == 1


def _yaml_blocks() -> Iterator[tuple[str, str, str]]:
    for name in GUIDE:
        for block in blocks(name):
            if block.language == "yaml":
                yield name, f"{block.mark}: {block.argument}", block.text


def test_every_configuration_in_the_guide_is_checked() -> None:
    found = list(_yaml_blocks())
    assert len(found) >= 3
    for name, mark, text in found:
        if mark.startswith("file: "):
            continue  # used by the examples that run
        assert mark in ("config: ", "config: partial"), f"{name}: unmarked YAML"
        data = read_document(text, name).data
        filled = {**MINIMAL, **data} if mark.endswith("partial") else data
        assert parse_config(filled, origin=name)


def _names_in_the_trainers() -> set[str]:
    """Every metric that code of the trainers can log, read from its string constants."""
    constants = {
        node.value
        for path in (ROOT / "ebft_core" / "trainers").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert "rewards/" in constants  # the beginning of names that users choose
    pattern = re.compile(r"(ebft|rollout|perf|train|sync)/[a-z_]+|policy_lag")
    return {text for text in constants if pattern.fullmatch(text)} | {"rewards/<name>"}


def test_training_metrics_are_all_explained() -> None:
    rows = table_rows(page_text("metrics.md"), "## Training")
    named = [row[0].strip("`") for row in rows]
    assert len(named) == len(set(named))
    assert set(named) == TRAINING_METRICS
    assert set(StepSums().metrics()) < set(named)
    assert all(len(row) == 5 and all(row) for row in rows)


def test_metrics_of_structured_mode_are_all_explained() -> None:
    rows = table_rows(page_text("metrics.md"), "## Structured mode")
    named = [row[0].strip("`") for row in rows]
    assert len(named) == len(set(named))
    assert set(named) == _names_in_the_trainers() - TRAINING_METRICS
    assert set(RatioSums(count=1, squares=1.0).metrics()) < set(named)
    assert all(len(row) == 5 and all(row) for row in rows)


def test_evaluation_metrics_are_all_explained_with_their_direction() -> None:
    rows = table_rows(page_text("metrics.md"), "## Evaluation")
    assert {row[0].strip("`"): row[3] for row in rows} == {
        name: metric.better or "neither" for name, metric in EVALUATION_METRICS.items()
    }


def test_metric_names_anywhere_in_the_guide_exist() -> None:
    evaluation = {f"eval/{name}" for name in EVALUATION_METRICS} | {"base/ce_loss"}
    known = _names_in_the_trainers() | TRAINING_METRICS | evaluation | _deployments()
    for name in [*GUIDE, "../README.md"]:
        for code in inline_code(page_text(name)):
            if re.fullmatch(r"(ebft|eval|perf|rollout|train|base|sync)/[a-z_-]+", code):
                assert code in known, f"{name}: {code}"


def _deployments() -> set[str]:
    """`flow/deployment`, as `prefect deployment run` takes it."""
    document = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))
    return {
        f"{deployment['entrypoint'].split(':')[1].replace('_', '-')}/{deployment['name']}"
        for deployment in document["deployments"]
    }


def test_deployments_of_the_guide_exist() -> None:
    named = set()
    for name in [*GUIDE, "../README.md"]:
        for line in command_lines(name):
            if found := re.search(r"prefect deployment run (\S+)", line):
                named.add(found[1])
    assert named == _deployments()


def _commands() -> dict[str, Any]:
    """Every command by its words: `run`, `archive push`."""
    found = {}
    for name, command in vars(typer.main.get_command(app))["commands"].items():
        below = vars(command).get("commands", {})
        found |= {f"{name} {word}": inner for word, inner in below.items()} or {name: command}
    return found


def test_commands_and_options_of_the_guide_exist() -> None:
    commands = _commands()
    seen = set()
    for name in [*GUIDE, "../CONTRIBUTING.md"]:
        for line in command_lines(name):
            found = re.match(r"(?:\S*/)?ebft (?P<rest>[a-z-].*)", line.split(" # ")[0].strip())
            if found is None:
                continue
            words = shlex.split(found["rest"])
            if words[0] == "--help":
                continue
            command = next((c for c in (words[0], " ".join(words[:2])) if c in commands), None)
            assert command is not None, f"{name}: ebft {' '.join(words[:2])}"
            seen.add(command)
            options = {"--help"}.union(*(p.opts + p.secondary_opts for p in commands[command].params))
            unknown = {word.split("=")[0] for word in words[1:] if word.startswith("-")} - options
            assert not unknown, f"{name}: ebft {command} {unknown}"
    assert seen >= {"run", "up", "validate", "preview", "stage", "merge", "evaluate"}


def test_options_mentioned_alone_exist() -> None:
    options = {opt for command in _commands().values() for p in command.params for opt in p.opts}
    for name in GUIDE:
        for code in inline_code(page_text(name)):
            if re.match(r"--[a-z]", code):
                assert re.split(r"[ =]", code)[0] in options, f"{name}: {code}"


def test_configuration_keys_of_the_guide_exist() -> None:
    sections = set(keys_at(()))
    tags = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "tasks").glob("*.py"))
    checked = 0
    for name in GUIDE:
        for code in inline_code(page_text(name)):
            found = re.match(r"([a-z]+(?:\.[a-z_]+)+)(?=$|: )", code)
            if found is None or found[1].split(".")[0] not in sections or f'"{found[1]}"' in tags:
                continue
            if found[1].endswith((".json", ".jsonl", ".py", ".yaml", ".html", ".db")):
                continue
            assert node_at(tuple(found[1].split("."))) is not None, f"{name}: {found[1]}"
            checked += 1
    assert checked > 50


def test_files_and_links_named_in_the_guide_exist() -> None:
    pattern = re.compile(r"(?:ebft_core|tasks|flows|configs|tests|benchmarks|docs)/[\w./-]*\w/?")
    for name in [*GUIDE, "../CONTRIBUTING.md"]:
        for code in inline_code(page_text(name)):
            if pattern.fullmatch(code):
                assert (ROOT / code).exists(), f"{name}: {code}"


def test_make_targets_of_the_guide_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for name in [*GUIDE, "../CONTRIBUTING.md"]:
        for line in command_lines(name):
            if found := re.match(r"make ([a-z-]+)", line):
                assert found[1] in targets, f"{name}: {line}"


def _strings_of_the_code() -> str:
    """All string constants, one per line; parts of one literal are joined, braces stand for values."""
    found = []
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


def test_error_texts_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    strings = _strings_of_the_code()
    headings = ("## The run file", "## Data", "## The model", "## During a run", "## Servers")
    places = [("troubleshooting.md", heading) for heading in headings]
    texts = [
        text
        for page, heading in [*places, ("structured-mode.md", "## When something is wrong")]
        for row in table_rows(page_text(page), heading)
        for text in inline_code(row[0])
    ]
    assert len(texts) > 40
    for text in set(texts) - FOREIGN_MESSAGES:
        # Formatted values split a sentence; `was killed by SIGKILL` ends in one.
        assert text.removesuffix("SIGKILL").strip() in strings, text


def test_axolotl_table_says_what_the_errors_say() -> None:
    rows = table_rows(page_text("coming-from-axolotl.md"), "## Which line becomes which")
    assert len(rows) > 25
    for theirs, ours in rows:
        ((key, value),) = yaml.safe_load(theirs.strip("`")).items()
        entry = RENAMED.get(key) or NOT_NEEDED.get(key) or NOT_NEEDED[f"{key.split('_')[0]}_*"]
        assert "axolotl" in entry[0], key
        advice = advise((key,), value)
        assert advice is not None
        assert advice.expected == ours.strip("`"), key


def test_stage_key_table_is_that_of_the_planner() -> None:
    from ebft_core.runs import _READS

    rows = table_rows(page_text("pipeline.md"), "## Keys: what makes a stage run again")
    table = {row[0].strip("`"): {c for c in inline_code(row[1])} for row in rows}
    unread = ("save_every", "keep_checkpoints", "tokens_per_forward", "share_prefixes", "sample_every")
    table["train"] -= {f"trainer.{key}" for key in unread}
    assert table == {stage: set(parts) for stage, parts in _READS.items()}


def test_no_page_holds_a_path_of_somebodys_machine() -> None:
    for path in [*DOCS.glob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "mkdocs.yml"]:
        assert not re.search(r"/(?:home|root|work|Users)/", path.read_text(encoding="utf-8")), path.name
