"""A transform for `data.transform: examples.stdlib_functions:pairs`: functions of Python files as examples.

The prompt is a function's head with its docstring, the ground truth its body. Nothing is downloaded: the
installed standard library has hundreds of them. A file without such a function is no example.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

LONGEST_BODY = 160
"""Characters: what a small model can be asked for."""


def pairs(record: Mapping[str, Any], tokenizer: Any, config: Any) -> list[dict[str, str]]:
    """Examples of one Python file."""
    del tokenizer, config
    text = str(record["text"])
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    return list(_examples(tree, text.splitlines(keepends=True)))


def _examples(tree: ast.Module, lines: list[str]) -> Iterator[dict[str, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        first = node.body[0]
        if first.lineno == node.lineno:  # written on the line of its head
            continue
        # The head ends with the docstring where there is one.
        start = first.end_lineno if ast.get_docstring(node) and len(node.body) > 1 else first.lineno - 1
        prompt = "".join(lines[node.lineno - 1 : start])
        body = "".join(lines[start : node.end_lineno])
        if prompt.strip() and body.strip() and len(body) <= LONGEST_BODY:
            yield {"prompt": prompt, "ground_truth": body}
