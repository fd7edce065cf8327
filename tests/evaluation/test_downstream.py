"""Downstream tasks from end to end: a model that has learned the answers by heart beside one that has not."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from data.builders import write_jsonl
from data.chats import CHATML, chat_tokenizer
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ebft_core.config import RunConfig, parse_config
from ebft_core.data.encoding import encode
from ebft_core.doctor.tasks import check_downstream
from ebft_core.errors import UserError
from ebft_core.evaluation import Comparison, Evaluation, compare_models, print_table
from ebft_core.evaluation.downstream.check import check_tasks, digest_tasks
from ebft_core.evaluation.downstream.problems import read_problems
from ebft_core.evaluation.downstream.suite import Suite
from ebft_core.evaluation.downstream.writing import ask_problems
from ebft_core.runs import plan_run
from ebft_core.stages.evaluate_model import answers_document
from tasks.report_answers import answer_views
from tests.evaluation.test_sandbox import REASON, needs_sandbox

FACTS = {"one": "1", "two": "2", "three": "3", "four": "4"}
PROGRAMS = {"def double(x):\n": "    return 2 * x", "def triple(x):\n": "    return 3 * x"}
WRONG = {"def half(x):\n": "    return x // 3"}
PROMPT = "{}="
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chat_tokenizer(CHATML)


def lessons(tokenizer: Any) -> torch.Tensor:
    """Every prompt with its answer and the end, padded with ends."""
    said = {**{PROMPT.format(word): digit for word, digit in FACTS.items()}, **PROGRAMS, **WRONG}
    chats = [{"role": "user", "content": "five"}]
    said[tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)] = "5"
    ids = [[*encode(tokenizer, [a + b])[0], tokenizer.eos_token_id] for a, b in said.items()]
    longest = max(map(len, ids))
    return torch.tensor([row + [tokenizer.eos_token_id] * (longest - len(row)) for row in ids])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> tuple[Path, Path]:
    """Folders of a random model and of the same one trained on the lessons."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ends))
    folders = tuple(tmp_path_factory.mktemp("models") / name for name in ("base", "tuned"))
    model.save_pretrained(folders[0])
    ids = lessons(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(120):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folders[1])
    for folder in folders:
        tokenizer.save_pretrained(folder)
    return folders


def config_of(*tasks: dict[str, Any], **evaluate: Any) -> RunConfig:
    settings = {"max_rows": 4, "n_samples": 2, "bootstrap_samples": 200, "sample_rollouts": 2, **evaluate}
    return parse_config(
        {
            "model": {"name_or_path": "unused"},
            "data": {"sources": [{"path": "unused.txt"}]},
            "ebft": {"stride": 8, "context_length": 4, "generate_max_len": 3},
            "trainer": {"device": "cpu", "precision": "float32"},
            "evaluate": {**settings, "tasks": [{"max_tokens": MAX_TOKENS, **task} for task in tasks]},
        }
    )


def rows_of(tokenizer: Any) -> list[dict[str, Any]]:
    """Held-out rows that the comparison needs beside the tasks."""
    texts = [f"text number {i}, of some length" for i in range(3)]
    return [
        {
            "input_ids": ids,
            "labels": ids,
            "is_target": [True] * len(ids),
            "document_lengths": [len(ids)],
            "prompt_lengths": [0],
            "document_hashes": [f"doc-{i}"],
        }
        for i, ids in enumerate(encode(tokenizer, texts))
    ]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("problems")
    facts = [{"prompt": PROMPT.format(w), "reference": [d, f"{d}."]} for w, d in FACTS.items()]
    tests = {
        "double": "assert double(4) == 8",
        "triple": "assert triple(4) == 12",
        "half": "assert half(8) == 4",
    }
    code = [
        {"prompt": prompt, "tests": test}
        for prompt, test in zip([*PROGRAMS, *WRONG], tests.values(), strict=True)
    ]
    chat = [{"prompt": [{"role": "user", "content": "five"}], "reference": "5"}]
    texts = [{"prompt": prompt, "reference": text} for prompt, text in PROGRAMS.items()]
    return {
        "texts": str(write_jsonl(folder / "texts.jsonl", texts)),
        "facts": str(write_jsonl(folder / "facts.jsonl", facts)),
        "code": str(write_jsonl(folder / "code.jsonl", code)),
        "chat": str(write_jsonl(folder / "chat.jsonl", chat)),
        "plain chat": str(write_jsonl(folder / "plain.jsonl", [{"prompt": "five", "reference": "5"}])),
    }


@pytest.fixture(scope="module")
def comparison(models: tuple[Path, Path], files: dict[str, str], tokenizer: Any) -> Comparison:
    config = config_of(
        {"type": "exact_match", "name": "facts", "file": files["facts"]},
        {"type": "exact_match", "name": "chat", "file": files["chat"]},
        {"type": "exact_match", "name": "plain", "file": files["plain chat"], "chat": True},
        {"type": "text_overlap", "name": "overlap", "file": files["texts"], "tokenize": "char"},
    )
    return compare_models(*models, rows_of(tokenizer), config)


def test_what_was_learned_by_heart_is_measured(comparison: Comparison) -> None:
    metrics = comparison.evaluation.metrics
    facts = metrics["tasks/facts/exact_match"]
    assert (facts.base, facts.tuned, facts.difference) == (0.0, 1.0, 1.0)
    assert (facts.interval, facts.documents) == ((1.0, 1.0), 4)
    assert metrics["tasks/chat/exact_match"].tuned == 1.0
    assert metrics["tasks/plain/exact_match"].tuned == 1.0
    assert metrics["tasks/overlap/chrf"].tuned == 100.0
    assert metrics["tasks/overlap/bleu"].base < 50.0
    assert metrics["tasks/overlap/bleu"].tuned == pytest.approx(100.0)
    assert "cfm" in metrics  # what was measured before is still there


def test_json_table_and_report_show_it(comparison: Comparison, tmp_path: Path) -> None:
    document = comparison.evaluation.to_json()
    text = json.dumps(document, allow_nan=False)
    assert Evaluation.from_json(json.loads(text)) == comparison.evaluation
    entry = document["metrics"]["tasks/facts/exact_match"]
    assert (entry["label"], entry["better"], entry["per"]) == ("facts: exact_match", "higher", "problem")
    output = io.StringIO()
    print_table(comparison.evaluation, Console(file=output, width=140))
    line = next(line for line in output.getvalue().splitlines() if "facts: exact_match" in line)
    assert "▲ better" in line
    path = tmp_path / "answers.json"
    path.write_text(json.dumps(answers_document(comparison, 2)))
    views = answer_views(path)
    assert [view.task for view in views] == ["facts"] * 2 + ["chat", "plain"] + ["overlap"] * 2
    assert views[0].tuned[0].shown[0].text == "1"
    assert (views[0].base[0].caption, views[0].tuned[0].caption) == ("wrong", "right")
    assert views[2].prompt.shown[0].text == "user: five"


@needs_sandbox
def test_programs_pass_or_fail_by_running(
    models: tuple[Path, Path], files: dict[str, str], tokenizer: Any
) -> None:
    task = {"type": "pass_at_k", "name": "code", "file": files["code"], "k": [1, 2], "stop": ["\ndef "]}
    config = config_of({**task, "n_samples": 3, "temperature": 0.05})
    tuned = AutoModelForCausalLM.from_pretrained(models[1])
    done: list[int] = []
    scores, answers = Suite(config, tokenizer, [], ()).measure(tuned, done.append)
    assert scores["tasks/code/pass_at_1"].value == pytest.approx(2 / 3)  # `half` was learned wrong
    assert scores["tasks/code/pass_at_2"].value == pytest.approx(2 / 3)
    assert [record.verdicts[0] for record in answers] == [
        "right",
        "right",
        "does not hold: assert half(8) == 4",
    ]
    assert sum(done) == 3
    assert 0 in done  # a chance to stop after every program


def test_greedy_answers_are_those_of_transformers(models: tuple[Path, Path], files: dict[str, str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    config = config_of({"type": "exact_match", "name": "facts", "file": files["facts"]}, batch_rows=3)
    task = config.evaluate.tasks[0]
    for folder in models:
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        written = ask_problems(task, read_problems(task, ""), tokenizer, config).write(model, lambda _: None)
        for word, answers in zip(FACTS, written, strict=True):
            prompt = torch.tensor(encode(tokenizer, [PROMPT.format(word)]))
            whole = model.generate(prompt, do_sample=False, max_new_tokens=MAX_TOKENS, use_cache=False)
            assert answers == [tokenizer.decode(whole[0, prompt.shape[1] :], skip_special_tokens=True)]


def test_samples_differ_and_do_not_depend_on_the_batches(
    models: tuple[Path, Path], files: dict[str, str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    model = AutoModelForCausalLM.from_pretrained(models[0]).eval()
    task = {
        "type": "exact_match",
        "name": "facts",
        "file": files["facts"],
        "n_samples": 2,
        "temperature": 1.0,
    }

    def written(batch_rows: int) -> list[list[str]]:
        config = config_of(task, batch_rows=batch_rows)
        ours = config.evaluate.tasks[0]
        return ask_problems(ours, read_problems(ours, ""), tokenizer, config).write(model, lambda _: None)

    together = written(4)
    assert together == written(1)
    assert all(first != second for first, second in together)


def test_held_out_examples_are_problems(models: tuple[Path, Path], tokenizer: Any) -> None:
    config = parse_config(
        {
            **config_of().model_dump(),
            "data": {"sources": [{"path": "unused.jsonl"}], "transform": "prompt_completion"},
            "ebft": {"mode": "structured"},
            "rollout": {"use_vllm": False},
            "evaluate": {"tasks": [{"type": "exact_match", "name": "own", "max_tokens": 8, "limit": 3}]},
        }
    )
    rows = []
    for number, (word, digit) in enumerate(FACTS.items()):
        prompt, answer = encode(tokenizer, [PROMPT.format(word), digit])
        ids = [*prompt, *answer, tokenizer.eos_token_id]
        rows.append(
            {
                "input_ids": ids,
                "is_target": [i >= len(prompt) for i in range(len(ids))],
                "document_lengths": [len(ids)],
                "prompt_lengths": [len(prompt)],
                "document_hashes": [f"doc-{number}"],
                "row_id": number,
            }
        )
    tuned = AutoModelForCausalLM.from_pretrained(models[1])
    suite = Suite(config, tokenizer, rows, [tokenizer.eos_token_id])
    scores, answers = suite.measure(tuned, lambda _: None)
    assert suite.problems == 3
    assert scores["tasks/own/exact_match"].value == 1.0
    assert (answers[0].origin, answers[0].prompt, answers[0].expected) == ("doc-0", "one=", "1")


BAD_LINES = {
    "not JSON": ("{", "Expecting"),
    "not an object": ("[]", "not a JSON object"),
    "no prompt": ('{"reference": "x"}', "`prompt` is neither"),
    "an empty talk": ('{"prompt": [], "reference": "x"}', "`prompt` is neither"),
    "no reference": ('{"prompt": "x"}', "`reference` is neither"),
    "a number": ('{"prompt": "x", "reference": 3}', "`reference` is neither"),
}
BAD_TESTS = {
    "no tests": ('{"prompt": "x", "reference": "x"}', "`tests` is neither"),
    "no Python": ('{"prompt": "x", "tests": "assert ("}', "not Python"),
    "no assertion": ('{"prompt": "x", "tests": "f(1)"}', "assert nothing"),
    "no function": ('{"prompt": "x", "tests": "assert x", "entry_point": "a b"}', "`entry_point`"),
    "a talk": ('{"prompt": [{"role": "user", "content": "x"}], "tests": "assert x"}', "`program: fenced`"),
}


@pytest.mark.parametrize(
    ("kind", "line", "what"),
    [("exact_match", *case) for case in BAD_LINES.values()]
    + [("pass_at_k", *case) for case in BAD_TESTS.values()],
    ids=[*BAD_LINES, *BAD_TESTS],
)
def test_a_bad_problem_is_named_by_its_line(kind: str, line: str, what: str, tmp_path: Path) -> None:
    good = {"prompt": "x", "reference": "x", "tests": "assert x"}
    path = tmp_path / "problems.jsonl"
    path.write_text(f"{json.dumps(good)}\n\n{line}\n")
    task = config_of({"type": kind, "name": "bad", "file": str(path)}).evaluate.tasks[0]
    with pytest.raises(UserError) as error:
        read_problems(task, "evaluate.tasks[0]")
    assert error.value.where == f"{path}:3"
    assert what in error.value.what


def test_tests_of_humaneval_are_read_as_they_are(tmp_path: Path) -> None:
    problem = {
        "task_id": "HumanEval/0",
        "prompt": "def double(x):\n",
        "entry_point": "double",
        "canonical_solution": "    return 2 * x",
        "test": "not read",
        "tests": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(2) == 4, 'why'\n",
    }
    path = write_jsonl(tmp_path / "problems.jsonl", [problem, problem, problem])
    task = config_of({"type": "pass_at_k", "name": "code", "file": str(path), "limit": 2}).evaluate.tasks[0]
    first, second = read_problems(task, "evaluate.tasks[0]")
    assert first.checks is not None
    assert first.checks.source.splitlines()[-1] == "check(double)"
    assert (first.origin, second.origin) == (f"{path}:1", f"{path}:2")


def test_files_are_looked_at_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    config = config_of({"type": "exact_match", "name": "facts", "file": str(path)})
    with pytest.raises(UserError, match="no such file") as error:
        digest_tasks(config)
    assert error.value.where == "evaluate.tasks[0].file"
    path.write_text("\n")
    with pytest.raises(UserError, match="no problem in the file"):
        check_tasks(config)
    path.write_text('{"prompt": "x", "reference": "y"}\n')
    check_tasks(config)
    before = digest_tasks(config)
    path.write_text('{"prompt": "x", "reference": "z"}\n')
    assert digest_tasks(config) != before


def test_the_content_of_a_file_is_part_of_the_stage_key(models: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    task = {"type": "exact_match", "name": "facts", "file": str(path)}
    config = config_of(task).model_dump() | {
        "model": {"name_or_path": str(models[0])},
        "data": {"sources": [{"path": "stdlib:abc.py"}]},
        "workspace": str(tmp_path),
    }
    keys = []
    for reference in ("1", "2", "1"):
        write_jsonl(path, [{"prompt": "x", "reference": reference}])
        keys.append({stage.name: stage.key for stage in plan_run(parse_config(config)).stages})
    assert keys[0] == keys[2]
    assert {name for name in keys[0] if keys[0][name] != keys[1][name]} == {"evaluate", "publish"}


def test_the_doctor_tries_the_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "problems.jsonl", [{"prompt": "x", "tests": "assert x"}])
    config = config_of({"type": "pass_at_k", "name": "code", "file": str(path)})
    assert check_downstream(config_of()).verdict == "ok"
    if not REASON:
        found = check_downstream(config)
        assert (found.verdict, found.detail) == ("ok", "code; generated programs run in bubblewrap's sandbox")
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = check_downstream(config)
    assert refused.verdict == "fail"
    assert "bubblewrap is not installed" in refused.detail


def test_programs_are_refused_where_there_is_no_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "x", "tests": "assert x"}\n')
    config = config_of({"type": "pass_at_k", "name": "code", "file": str(path)})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="bubblewrap is not installed"):
        check_tasks(config)
