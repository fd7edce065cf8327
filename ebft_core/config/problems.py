"""From pydantic's complaints to errors a user can act on: key, file and line, value, expected, hint."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import ErrorDetails

from ebft_core.config import legacy, schema_view
from ebft_core.config.redaction import redact
from ebft_core.config.yaml_reader import KeyPath
from ebft_core.errors import UserError

NO_ORIGIN = "<dict>"

_KIND_OF_SECTION = ("union_tag_invalid", "union_tag_not_found")
"""Complaints about the key that says which kind of section this is."""


@dataclass(frozen=True)
class Source:
    """The values under validation and where each of them was written."""

    data: Mapping[str, Any]
    origin: str = NO_ORIGIN
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    overridden: frozenset[KeyPath] = frozenset()  # paths set on the command line

    def where(self, path: KeyPath) -> str:
        """`ebft.stride (configs/x.yaml:12)`: the key path and the nearest line that is known."""
        prefixes = [path[:end] for end in range(len(path), -1, -1)]
        made_by_override = path not in self.lines and any(o[: len(path)] == path for o in self.overridden)
        if made_by_override or any(prefix in self.overridden for prefix in prefixes):
            return f"{dotted(path)} (--set)"
        line = next((self.lines[prefix] for prefix in prefixes if prefix in self.lines), None)
        if line is not None:
            return f"{dotted(path)} ({self.origin}:{line})"
        return dotted(path) if self.origin == NO_ORIGIN else f"{dotted(path)} ({self.origin})"

    def value_at(self, path: KeyPath) -> Any:
        """The value written at `path`; None where nothing is written."""
        value: Any = self.data
        for part in path:
            if not _holds(value, part):
                return None
            value = value[part]
        return value


def dotted(path: KeyPath) -> str:
    """`data.sources[0].path`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def from_pydantic(details: Sequence[ErrorDetails], source: Source) -> dict[KeyPath, UserError]:
    """One error per key path, in the order pydantic found them (a union complains once per member)."""
    errors: dict[KeyPath, UserError] = {}
    for detail in details:
        path = _real_path(detail, source.data)
        if path not in errors:
            errors[path] = _error(detail, path, source)
    return errors


def _real_path(detail: ErrorDetails, data: Mapping[str, Any]) -> KeyPath:
    """The location without the names of union members, which pydantic mixes in."""
    path: list[str | int] = []
    value: Any = data
    location = detail["loc"]
    for position, part in enumerate(location):
        if _holds(value, part):
            path.append(part)
            value = value[part]
        elif detail["type"] == "missing" and position == len(location) - 1:
            path.append(part)
    if detail["type"] in _KIND_OF_SECTION:
        path.append(detail["ctx"]["discriminator"].strip("'"))
    return tuple(path)


def _holds(value: Any, part: str | int) -> bool:
    if isinstance(value, Mapping):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(value)


def _error(detail: ErrorDetails, path: KeyPath, source: Source) -> UserError:
    kind = detail["type"]
    if kind in ("missing", "union_tag_not_found"):
        return _missing(path, source)
    value = source.value_at(path)
    if kind == "extra_forbidden":
        return _unknown_key(path, value, source)
    node = schema_view.node_at(path)
    shown = value if value is not None else "null"
    return UserError(
        _what(kind, detail["msg"], path),
        where=source.where(path),
        value=redact(shown, _last_name(path)),
        expected=None if node is None else schema_view.describe(node),
        hint=legacy.value_hint(path, value) or _value_hint(value, node),
    )


def _what(kind: str, message: str, path: KeyPath) -> str:
    name = dotted(path)
    if kind in ("literal_error", "union_tag_invalid"):
        return f"`{name}` does not take this value"
    if kind.startswith(("greater_than", "less_than")) or kind == "finite_number":
        return f"`{name}` is out of range"
    if kind == "too_short":
        return f"`{name}` is empty"
    if kind == "string_pattern_mismatch":
        return f"`{name}` has characters or a length that are not allowed"
    if kind.endswith("_type"):
        return f"`{name}` has the wrong type"
    return f"`{name}`: {message}"


def _missing(path: KeyPath, source: Source) -> UserError:
    node = schema_view.node_at(path)
    return UserError(
        f"`{dotted(path)}` is required",
        where=source.where(path),
        expected=None if node is None else schema_view.describe(node),
        hint=legacy.missing_hint(path, source.data),
    )


def _value_hint(value: Any, node: schema_view.Node | None) -> str | None:
    if node is None:
        return None
    kinds = {option.get("type") for option in node.get("anyOf", [node])}
    section = schema_view.section_of(node)
    if value is None and section is not None:
        return "remove the line to take the defaults, or write keys below it"
    if isinstance(value, str) and section is not None and "path" in section.get("properties", {}):
        return f"write `- path: {redact(value)}`"
    if isinstance(value, str):
        hint = _text_hint(value, kinds)
        if hint is not None:
            return hint
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        return f"write {value:.0f}"
    choices = [str(choice) for option in node.get("anyOf", [node]) for choice in option.get("enum", [])]
    return next(
        (f"did you mean `{close}`?" for close in difflib.get_close_matches(str(value), choices, n=1)), None
    )


def _text_hint(value: str, kinds: set[Any]) -> str | None:
    if kinds & {"integer", "number"} and _is_number(value):
        return "write the number without quotes"
    if "boolean" in kinds:
        return "write true or false, without quotes"
    if "array" in kinds and "string" not in kinds:
        return "write a list: `[a, b]` or one `- item` per line"
    return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _unknown_key(path: KeyPath, value: Any, source: Source) -> UserError:
    renamed = legacy.advise(path, value)
    if renamed is not None:
        return UserError(
            f"`{dotted(path)}` is {renamed.origin}, not a key of this project",
            where=source.where(path),
            value=redact(value, _last_name(path)),
            expected=renamed.expected,
            hint=renamed.hint,
        )
    section = dotted(path[:-1])
    accepted = schema_view.keys_at(path[:-1])
    return UserError(
        f"unknown key `{_last_name(path)}`" + (f" in `{section}`" if section else ""),
        where=source.where(path),
        value=redact(value, _last_name(path)),
        expected=f"one of: {', '.join(accepted)}" if accepted else "no keys here",
        hint=_did_you_mean(_last_name(path), accepted),
    )


def _did_you_mean(name: str, here: Sequence[str]) -> str | None:
    """The same key elsewhere, else a similar key here, else a similar key elsewhere."""
    everywhere = schema_view.leaf_paths()
    suggestions = everywhere.get(name, [])
    suggestions = suggestions or difflib.get_close_matches(name.lower(), here, n=2, cutoff=0.6)
    if not suggestions:
        close = difflib.get_close_matches(name.lower(), list(everywhere), n=2, cutoff=0.75)
        suggestions = [path for key in close for path in everywhere[key]]
    return f"did you mean {' or '.join(f'`{item}`' for item in suggestions[:3])}?" if suggestions else None


def _last_name(path: KeyPath) -> str:
    return next((part for part in reversed(path) if isinstance(part, str)), "")
