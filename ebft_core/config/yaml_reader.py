"""A strict YAML reader: YAML 1.2 scalars, no duplicate keys, and the line of every key.

PyYAML's `safe_load` keeps the last of two equal keys, reads `1e-5` as text and `no` as false. This
reader composes nodes with PyYAML and builds the values itself, so a mistake has a file and a line.
Aliases are allowed; tags and merge keys (`<<`), which YAML 1.2 does not have, are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from ebft_core.errors import UserError

KeyPath = tuple[str | int, ...]

MAX_DEPTH = 32  # an alias that contains itself, or a file that is no configuration
MAX_NODES = 20_000  # aliases of aliases grow exponentially ("billion laughs")

_FLOAT = re.compile(
    r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"
)
_INT = re.compile(r"^[-+]?[0-9]+$|^0o[0-7]+$|^0x[0-9a-fA-F]+$")
_BOOL = re.compile(r"^(true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"^(~|null|Null|NULL|)$")
_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = {f"{_TAG}{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq")}


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalar types of the YAML 1.2 core schema (in place of YAML 1.1's)."""


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes every string another reader, 1.1 or 1.2, would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        """Equal lists are written out, not as `&id001`."""
        return True


_Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in (
    ("null", _NULL, ["~", "n", "N", ""]),
    ("bool", _BOOL, list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("merge", re.compile(r"^<<$"), ["<"]),
):
    _Loader.add_implicit_resolver(f"{_TAG}{_name}", _pattern, _first)
    if _name in ("int", "float"):
        _Dumper.add_implicit_resolver(f"{_TAG}{_name}", _pattern, _first)


@dataclass
class YamlDocument:
    """A mapping read from YAML, and where each of its keys stands."""

    data: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)  # 1-based line of a key or list item


def read_document(text: str, origin: str) -> YamlDocument:
    """Read one YAML mapping.

    Args:
        text: the YAML text.
        origin: file name for errors.

    Raises:
        UserError: not YAML, not a mapping, duplicate or non-text keys, tags, several documents.
    """
    lines: dict[KeyPath, int] = {}
    value = _read(text, origin, lines)
    if value is None:
        raise UserError(
            "the file is empty", where=origin, expected="a YAML mapping with `model:` and `data:`"
        )
    if not isinstance(value, dict):
        raise UserError(
            "the file is not a mapping of sections",
            where=origin,
            value=type(value).__name__,
            expected="a YAML mapping with `model:` and `data:`",
        )
    return YamlDocument(value, lines)


def read_value(text: str, origin: str) -> Any:
    """Read one YAML value, as in `--set key=value`.

    Raises:
        UserError: as `read_document`, without the demand for a mapping.
    """
    return _read(text, origin, {})


def write_document(data: dict[str, Any]) -> str:
    """YAML text that `read_document` reads back to an equal mapping, keys in the given order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _read(text: str, origin: str, lines: dict[KeyPath, int]) -> Any:
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        raise UserError(
            "the text holds a character that YAML does not allow",
            where=f"{origin} (character {error.position})",
            expected="printable UTF-8 text",
        ) from error
    try:
        node = loader.get_single_node()
        return None if node is None else _Builder(loader, origin, lines).build(node, ())
    except RecursionError as error:
        raise UserError("the YAML is nested too deeply", where=origin) from error
    except yaml.YAMLError as error:
        raise _syntax_error(error, origin) from error
    finally:
        loader.dispose()


def _syntax_error(error: yaml.YAMLError, origin: str) -> UserError:
    """PyYAML's complaint with its line, without its excerpt of the text (which may hold a secret)."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return UserError("the text is not valid YAML", where=origin)
    mark = error.problem_mark
    what = f"not valid YAML: {error.problem or error.context}"
    hint = None
    if "alias" in what:
        hint = "put text that begins with `*` or `&` in quotes"
    elif "\\t" in what:
        hint = "indent with spaces, not with tabs"
    elif "single document" in str(error.context):
        what, hint = "the file holds several YAML documents", "keep one run per file"
    elif "mapping values are not allowed" in what:
        hint = "put text that contains `: ` in quotes"
    return UserError(what, where=f"{origin}:{mark.line + 1}", hint=hint)


class _Builder:
    """Builds values from nodes and notes the line of every key."""

    def __init__(self, loader: _Loader, origin: str, lines: dict[KeyPath, int]) -> None:
        self.loader = loader
        self.origin = origin
        self.lines = lines
        self.nodes = 0

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        self.nodes += 1
        if len(path) > MAX_DEPTH or self.nodes > MAX_NODES:
            raise self._error("the YAML is too deep or too large to be a configuration", node)
        if node.tag not in _PLAIN_TAGS:
            raise self._error("YAML tags are not used here", node, value=node.tag, expected="plain values")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._item(child, (*path, index)) for index, child in enumerate(node.value)]
        return self._scalar(node)

    def _scalar(self, node: yaml.Node) -> Any:
        if node.tag == f"{_TAG}int":
            return self._integer(node)
        return self.loader.construct_object(node)

    def _integer(self, node: yaml.Node) -> int:
        try:
            return int(node.value, 0) if node.value[:2] in ("0x", "0o") else int(node.value)
        except ValueError:  # Python refuses to read thousands of digits
            raise self._error("a number with too many digits", node) from None

    def _item(self, node: yaml.Node, path: KeyPath) -> Any:
        self.lines[path] = node.start_mark.line + 1
        return self.build(node, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            if key in result:
                raise self._error(
                    f"the key `{key}` stands twice",
                    key_node,
                    expected=f"one `{key}`; the other is on line {self.lines[(*path, key)]}",
                )
            self.lines[(*path, key)] = key_node.start_mark.line + 1
            result[key] = self.build(value_node, (*path, key))
        return result

    def _key(self, node: yaml.Node) -> str:
        if node.tag == f"{_TAG}merge":
            raise self._error("merge keys (`<<`) are not part of YAML 1.2", node, hint="write the keys out")
        if node.tag != f"{_TAG}str":
            raise self._error("a key that is not text", node, expected="a name")
        return str(node.value)

    def _error(self, what: str, node: yaml.Node, **parts: Any) -> UserError:
        return UserError(what, where=f"{self.origin}:{node.start_mark.line + 1}", **parts)
