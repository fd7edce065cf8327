"""Writes `docs/config-reference.md` from the schema, so the page cannot say anything else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ebft_core.config import schema_view

_INTRO = """\
# Configuration reference

A run is one YAML file. This page is generated from the schema by `ebft reference --output
docs/config-reference.md`; do not edit it by hand.

* Check a file: `ebft validate FILE`. It prints the resolved configuration, or every error with its line.
* Change a value for one run: `--set section.key=value`, for example `--set ebft.stride=4`. List items have an
  index: `--set data.sources.0.path=texts/*.txt`.
* Scalars are those of YAML 1.2: `1e-5` is a number; `yes` and `no` are text, write `true` and `false`.
* Unknown and duplicate keys are errors. So are the names of other tools: the error names our key.
* Only `model` and `data` are required.
"""


def reference_text() -> str:
    """The whole page as Markdown."""
    parts = [_INTRO]
    for path, node in schema_view.sections():
        parts.append(_section(path, node))
    return "\n".join(parts)


def _section(path: str, node: Mapping[str, Any]) -> str:
    lines = [f"## `{path}`" if path else "## Top level", ""]
    if path and node.get("description"):
        lines += [_one_line(node["description"]), ""]
    rows = [
        f"| `{name}` | {_type(field)} | {_default(name, field, node)} | {_meaning(name, field, path)} |"
        for name, field in node.get("properties", {}).items()
    ]
    if rows:
        lines += ["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _type(field: schema_view.Node) -> str:
    return schema_view.describe(field).replace("|", "\\|")


def _default(name: str, field: schema_view.Node, section: Mapping[str, Any]) -> str:
    if name in section.get("required", []):
        return "required"
    if schema_view.section_of(schema_view.resolve(field)) is not None:
        return "null" if field.get("default", {}) is None else "its defaults"
    return f"`{json.dumps(field.get('default'), ensure_ascii=False)}`"


def _meaning(name: str, field: schema_view.Node, section: str) -> str:
    resolved = schema_view.resolve(field)
    below = schema_view.section_of(resolved)
    text = resolved.get("description") or ("" if below is None else below.get("description", ""))
    if below is not None:
        anchor = f"{section}{name}".replace(".", "").replace("[]", "")
        text = f"{text} See [`{f'{section}.{name}'.strip('.')}`](#{anchor})."
    return _one_line(text)


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
