"""Tasks of lm-evaluation-harness, with the real package and a task of our own; skipped without it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from data.builders import byte_tokenizer, tiny_model, write_jsonl
from transformers import AutoModelForCausalLM

from ebft_core.config.tasks_section import LMEvalTask
from ebft_core.errors import UserError
from ebft_core.evaluation.downstream import check as checking
from ebft_core.evaluation.downstream import harness_tasks
from ebft_core.evaluation.downstream.harness_tasks import check_harness, run_harness
from tests.evaluation.test_downstream import config_of

INSTALLED = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not INSTALLED, reason="lm-evaluation-harness is not installed")
TASK = """
task: own_choice
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Definition and data of a task whose right answers alternate; nothing comes from the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "questions.jsonl"
    choices = ["seven", "eight"]
    write_jsonl(data, [{"question": f"{i} + 5 is", "choices": choices, "answer": i % 2} for i in range(6)])
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "own.yaml").write_text(TASK.format(data=json.dumps(str(data))))
    return tmp_path


@needs_harness
@pytest.mark.slow
def test_scores_of_every_problem(folder: Path) -> None:
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    tokenizer: Any = byte_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(tiny_model(folder / "model", tokenizer))
    task = LMEvalTask(type="lm_eval", name="own", task="own_choice", limit=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness_tasks, "_task_manager", lambda _: manager)  # spares the index of 14,000 tasks
        check_harness(task, "evaluate.tasks[0]")
        scores = run_harness(task, model, tokenizer, config_of())
        values = scores["acc"].statistics_SP[0].tolist()
        # A random model prefers the same choice everywhere or not, but each problem is right or wrong.
        assert len(values) == 5
        assert set(values) <= {0.0, 1.0}
        assert scores["acc"].value == pytest.approx(sum(values) / 5)
        with pytest.raises(UserError, match="no such metric") as error:
            run_harness(task.model_copy(update={"metrics": ["f1"]}), model, tokenizer, config_of())
        assert error.value.expected == "acc"
        with pytest.raises(UserError, match="no such task"):
            check_harness(task.model_copy(update={"task": "nothing"}), "evaluate.tasks[0]")


def test_without_the_package_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise checking.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(checking.metadata, "version", missing)
    config = config_of()
    task = LMEvalTask(type="lm_eval", name="own", task="hellaswag")
    config = config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"tasks": [task]})})
    with pytest.raises(UserError, match="is not installed") as error:
        checking.digest_tasks(config)
    assert "ebft[lm-eval]" in str(error.value.hint)
