"""The command line as a program: exit codes, output, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MINIMAL = "model: {name_or_path: some/model}\ndata: {sources: [{path: a.txt}]}\n"
HEAVY = ("torch", "transformers", "datasets", "peft", "numpy", "prefect", "mlflow", "pyarrow")


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


def ebft(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "ebft_core.cli", *arguments)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(MINIMAL)
    return file


def test_validate_imports_nothing_heavy(run_file: Path) -> None:
    code = (
        "import sys\nfrom ebft_core.cli import main\n"
        "try:\n    main(['validate', sys.argv[1]])\n"
        f"finally:\n    print('loaded:', sorted(set({HEAVY!r}) & set(sys.modules)))\n"
    )
    result = python("-c", code, str(run_file))
    assert "stride: 8" in result.stdout
    assert result.stdout.splitlines()[-1] == "loaded: []"


def test_the_config_package_imports_nothing_heavy() -> None:
    code = f"import sys, ebft_core, ebft_core.config; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    assert python("-c", code).stdout == "[]\n"


def test_validate_prints_the_resolved_configuration_which_is_valid_again(run_file: Path) -> None:
    first = ebft("validate", str(run_file), "--set", "ebft.stride=4", "--set", "lora=none")
    assert first.returncode == 0
    assert first.stderr == ""
    run_file.write_text(first.stdout)
    second = ebft("validate", str(run_file))
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert "stride: 4" in first.stdout
    assert "lora: null" in first.stdout


def test_validate_reports_every_error_of_every_file_on_stderr(run_file: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(MINIMAL + "ebft: {stride: 0, use_whitening: true}\nname: x\nseed: 1\n")
    result = ebft("validate", str(bad), str(run_file), str(tmp_path / "none.yaml"))
    assert result.returncode == 78
    assert result.stderr.count("error: ") == 4
    assert f"ebft.stride ({bad}:3)" in result.stderr
    assert "ebft.whitening: feature" in result.stderr
    assert "Traceback" not in result.stderr
    assert f"# {run_file}" in result.stdout  # the good one is still shown


def test_validate_gives_advice_on_stderr(run_file: Path) -> None:
    result = ebft("validate", str(run_file), "--set", "ebft.n_samples_per_prompt=2")
    assert result.returncode == 0
    assert "advice: ebft.n_samples_per_prompt" in result.stderr


def test_schema_and_reference_write_files_and_standard_output(tmp_path: Path) -> None:
    assert ebft("schema", "--output", str(tmp_path / "s.json")).returncode == 0
    assert json.loads((tmp_path / "s.json").read_text())["title"] == "RunConfig"
    assert ebft("reference").stdout.startswith("# Configuration reference")


def test_a_file_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    result = ebft("schema", "--output", str(tmp_path / "no" / "folder.json"))
    assert result.returncode == 78
    assert "cannot be written" in result.stderr


def test_a_stage_without_a_planned_run_is_a_user_error(tmp_path: Path) -> None:
    result = ebft("stage", "tokenize", "--run-dir", str(tmp_path))
    assert result.returncode == 78


def test_an_unexpected_exception_exits_70_with_its_traceback() -> None:
    code = "from ebft_core.cli import exit_codes\nwith exit_codes():\n    1 / 0\n"
    result = python("-c", code)
    assert result.returncode == 70
    assert "ZeroDivisionError" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["--help"], ["validate", "--help"], ["stage", "--help"], ["preview", "--help"]]
)
def test_help_needs_no_torch(arguments: list[str]) -> None:
    result = ebft(*arguments)
    assert result.returncode == 0
    assert "Usage" in result.stdout
