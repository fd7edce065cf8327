"""What the guide's page about the server quotes is what the code says."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.docs_pages import ROOT, inline_code, page_text, table_rows

PAGE = "vllm-server.md"
VLLMS_OWN = {"maximum context length"}


def strings(folder: Path) -> str:
    found = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_errors_of_the_troubleshooting_table_are_those_of_the_code() -> None:
    code = strings(ROOT / "ebft_core" / "vllm") + strings(ROOT / "ebft_core" / "config")
    rows = table_rows(page_text(PAGE), "## Troubleshooting")
    assert len(rows) > 20
    for row in rows:
        (text,) = inline_code(row[0])
        assert text in code or text in VLLMS_OWN, text
        assert len(row) == 3
        assert all(row)


def test_environment_variables_of_the_page_are_read() -> None:
    sources = (ROOT / "Makefile").read_text() + strings(ROOT / "ebft_core" / "vllm")
    for code in inline_code(page_text(PAGE)):
        name = code.split("=")[0]
        if name.startswith(("VLLM_", "CUDA_")):
            assert name in sources, name
