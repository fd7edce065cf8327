"""`ebft doctor`: each thing that can be wrong is found, named, and decides the exit code."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from data.builders import tiny_model, word_tokenizer
from data.chats import CHATML, CLOSES_WITH_EOS, WITH_BOS, chat_tokenizer
from orchestration.builders import micro_document
from packaging.requirements import Requirement

from ebft_core.config import RunConfig, parse_config
from ebft_core.doctor import Check
from ebft_core.tested_versions import TESTED, fit_of
from flows.doctor import all_checks, doctor

ROOT = Path(__file__).parents[1]
NOBODY = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def _no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)


def config(folder: Path, **sections: object) -> RunConfig:
    return parse_config({**micro_document(folder), **sections})


def look(run: RunConfig) -> dict[str, Check]:
    return {check.name: check for check in all_checks(run)}


def test_the_tested_versions_are_the_pins() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("#")[0].strip().split("==") for line in lines if "==" in line)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {Requirement(line).name for line in project["dependencies"]}
    assert {name: pins[name] for name in TESTED} == TESTED
    assert needed & set(pins) <= set(TESTED)


@pytest.mark.parametrize(
    ("line", "version", "fit"),
    [
        ("torch>=2.11", "2.13.0+cu130", "tested"),
        ("torch>=2.11", "2.12.1", "untested"),
        ("torch>=2.11", "2.10.0", "refused"),
        ("fastapi>=0.139,<0.151", "0.151.0", "refused"),
        ("rich>=13.7", "99.0", "tested"),
    ],
)
def test_versions_are_judged_by_range_and_pin(line: str, version: str, fit: str) -> None:
    assert fit_of(Requirement(line), version) == fit


def test_a_run_that_would_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(config(tmp_path), as_json=True) == 0
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert "fail" not in {check["verdict"] for check in found.values()}
    assert "attention sdpa" in found["training"]["detail"]
    assert "0 of 6 stages" in found["data and disk"]["detail"]
    assert {"versions", "memory", "workspace", "model", "vLLM", "MLflow", "Prefect"} <= set(found)
    assert not list((tmp_path / "workspace").iterdir())


def test_without_a_run_file_the_machine_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert doctor(None, as_json=False) == 0
    shown = capsys.readouterr().out
    assert "versions" in shown
    assert "MLflow  " not in shown
    assert "0 failed" in shown


def test_what_would_not_work_fails_and_nothing_hides_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config(
        tmp_path,
        model={"name_or_path": str(tmp_path / "nothing")},
        tracking={"mlflow_uri": NOBODY},
        data={"sources": [{"path": str(tmp_path / "none*.txt")}], "sequence_length": 64},
    )
    (tmp_path / "file").write_text("", encoding="utf-8")
    run = run.model_copy(update={"workspace": str(tmp_path / "file")})
    below = config(tmp_path).model_copy(update={"workspace": str(tmp_path / "file" / "below")})
    assert look(below)["data and disk"].verdict == "fail"
    assert doctor(run, as_json=True) == 1
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    for name in ("workspace", "data and disk", "model", "MLflow"):
        assert found[name]["verdict"] == "fail", name
        assert found[name]["hint"], name
    assert found["Prefect"]["verdict"] == "ok"


def test_a_prefect_server_that_does_not_answer(tmp_path: Path) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: f"{NOBODY}/api"}):
        check = look(config(tmp_path))["Prefect"]
    assert check.verdict == "fail"
    assert NOBODY in check.detail


def test_a_cuda_device_where_there_is_none(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert look(config(tmp_path, trainer={"device": "cuda", "max_steps": 1}))["training"].verdict == "fail"


def chat(folder: Path, template: str | None, *, bos: bool) -> dict[str, Check]:
    model = tiny_model(folder / "model", chat_tokenizer(template, bos=bos))
    (folder / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    data = {"sources": [{"path": str(folder / "rows.jsonl")}], "transform": "chat", "sequence_length": 64}
    return look(config(folder, model={"name_or_path": str(model)}, data=data))


@pytest.mark.parametrize(
    ("template", "bos", "verdict", "says"),
    [
        (CHATML, False, "ok", "none is written"),
        (CHATML, True, "ok", "'<s>' once"),
        (WITH_BOS, False, "ok", "'<s>' once"),
        (WITH_BOS, True, "warn", "both the template and the tokenizer"),
        ("{{ bos_token }}" + WITH_BOS, False, "fail", "'<s>' 2 times"),
    ],
)
def test_the_beginning_of_a_conversation(
    tmp_path: Path, template: str, bos: bool, verdict: str, says: str
) -> None:
    check = chat(tmp_path, template, bos=bos)["begin of sequence"]
    assert (check.verdict, says in check.detail) == (verdict, True), check


def test_the_end_of_a_turn(tmp_path: Path) -> None:
    assert "<|end|>" in chat(tmp_path, CLOSES_WITH_EOS, bos=False)["end of turn"].detail


def test_a_template_without_an_end_of_turn(tmp_path: Path) -> None:
    endless = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    check = chat(tmp_path, endless, bos=False)["end of turn"]
    assert check.verdict == "fail"
    assert "ends an assistant's turn" in check.detail


def test_documents_begin_as_the_tokenizer_begins_them(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", word_tokenizer(bos=True))
    check = look(config(tmp_path, model={"name_or_path": str(model)}))["begin of sequence"]
    assert "'<s>' in front of every document" in check.detail


def test_structured_mode_needs_an_environment_with_vllm(tmp_path: Path) -> None:
    from data.builders import structured

    sources = config(tmp_path).data.sources
    run = structured([source.path for source in sources], model=micro_document(tmp_path)["model"])
    vllm = run.vllm.model_copy(update={"python": str(tmp_path / "python")})
    found = look(run.model_copy(update={"vllm": vllm, "workspace": str(tmp_path / "w")}))
    assert found["vLLM"].verdict == "fail"
    assert "make setup-vllm" in (found["vLLM"].hint or "")
    assert "vLLM GPUs" in found
