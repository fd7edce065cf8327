"""The JSON Schema of the configuration, and what it says at a key path.

Errors (`problems.py`) and the reference page (`reference.py`) describe a field from here, so that they
cannot disagree with the schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from ebft_core.config.schema import RunConfig
from ebft_core.config.yaml_reader import KeyPath

Node = Mapping[str, Any]

_TYPE_NAMES = {
    "integer": "integer",
    "number": "number",
    "boolean": "true or false",
    "string": "text",
    "null": "null",
    "object": "mapping",
    "array": "list",
}
_BOUNDS = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))


@cache
def run_schema() -> dict[str, Any]:
    """JSON Schema of a run file, as editors use it."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}


def schema_text() -> str:
    """The JSON Schema as the text of `configs/schema.json`."""
    return json.dumps(run_schema(), indent=2, ensure_ascii=False) + "\n"


def resolve(node: Node) -> Node:
    """The node behind a `$ref`; keys beside the reference (default, description) win."""
    if "$ref" not in node:
        return node
    target = run_schema()["$defs"][node["$ref"].rsplit("/", 1)[1]]
    return {**target, **{key: value for key, value in node.items() if key != "$ref"}}


def options(node: Node) -> list[Node]:
    """The members of a union, resolved; a node that is none is its only member."""
    return [resolve(option) for option in node.get("anyOf", node.get("oneOf", [node]))]


def section_of(node: Node) -> Node | None:
    """The section a node stands for, also behind `null or section`; None for plain values."""
    return next(iter(_sections_of(node)), None)


def _sections_of(node: Node) -> list[Node]:
    """The sections a node may stand for: several where a key of theirs, such as `type`, says which."""
    return [
        option
        for option in options(node)
        if option.get("type") == "object" and option.get("additionalProperties") is False
    ]


def node_at(path: KeyPath) -> Node | None:
    """The schema node at a key path, or None where the schema knows no such key."""
    node: Node = run_schema()
    for part in path:
        child = _child(resolve(node), part)
        if child is None:
            return None
        node = child
    return resolve(node)


def _child(node: Node, part: str | int) -> Node | None:
    if "discriminator" in node and part == node["discriminator"]["propertyName"]:
        return {"type": "string", "enum": list(node["discriminator"]["mapping"])}
    for option in options(node):
        if isinstance(part, int) and "items" in option:
            return option["items"]
        if isinstance(part, str) and part in option.get("properties", {}):
            return option["properties"][part]
        if isinstance(part, str) and isinstance(option.get("additionalProperties"), dict):
            return option["additionalProperties"]
    return None


def keys_at(path: KeyPath) -> list[str]:
    """The keys that the section at `path` takes."""
    node = node_at(path)
    found = [] if node is None else _sections_of(node)
    return list(dict.fromkeys(name for section in found for name in section.get("properties", {})))


def sections() -> Iterator[tuple[str, Node]]:
    """Every section of a run file with its dotted path, the root first (path ``""``)."""
    yield from _walk("", run_schema())


def _walk(path: str, node: Node) -> Iterator[tuple[str, Node]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        resolved = resolve(child)
        is_list = resolved.get("type") == "array"
        dotted = f"{path}.{name}" if path else name
        below = resolve(resolved["items"]) if is_list else resolved
        kinds = below.get("discriminator", {}).get("mapping")
        for kind in kinds or [""]:
            section = section_of(below if kinds is None else resolve({"$ref": kinds[kind]}))
            if section is not None:
                yield from _walk(f"{dotted}[{kind}]" if is_list else dotted, section)


@cache
def leaf_paths() -> dict[str, list[str]]:
    """Dotted paths of every key of every section, by the key's own name."""
    paths: dict[str, list[str]] = {}
    for section, node in sections():
        for name in node.get("properties", {}):
            paths.setdefault(name, []).append(f"{section}.{name}" if section else name)
    return paths


def describe(node: Node) -> str:
    """What a field accepts, in words: `integer ≥ 1`, `one of: rloo, group_norm`, `list of text or null`."""
    node = resolve(node)
    if "anyOf" in node or "oneOf" in node:
        return " or ".join(dict.fromkeys(describe(option) for option in options(node)))
    if "const" in node:
        return f"`{node['const']}`"
    if "enum" in node:
        return "one of: " + ", ".join(str(value) for value in node["enum"])
    if node["type"] in ("object", "array"):
        return _describe_container(node)
    bounds = [f"{sign} {node[key]:g}" for key, sign in _BOUNDS if key in node]
    text = _TYPE_NAMES[node["type"]] + ("" if not bounds else " " + " and ".join(bounds))
    return text + (f" matching `{node['pattern']}`" if "pattern" in node else "")


def _describe_container(node: Node) -> str:
    if section_of(node) is not None:
        return "a section" if node.get("properties") else "an empty section"
    if node["type"] == "array":
        some = "non-empty list" if node.get("minItems") else "list"
        return f"{some} of {describe(node['items'])}"
    by_pattern = node.get("patternProperties")  # a mapping whose names have a form
    values = node["additionalProperties"] if by_pattern is None else next(iter(by_pattern.values()))
    return f"mapping to {describe(values)}"
