"""Reads run files: YAML text and `--set` overrides in, a checked `RunConfig` or every error out."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ebft_core.config import problems, schema_view
from ebft_core.config.advice import advice
from ebft_core.config.problems import NO_ORIGIN, Source, dotted
from ebft_core.config.redaction import redact
from ebft_core.config.rules import Problem, broken_rules
from ebft_core.config.schema import RunConfig
from ebft_core.config.yaml_reader import KeyPath, read_document, read_value, write_document
from ebft_core.errors import UserError, UserErrors

_INDEX = re.compile(r"\[(\d+)\]")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file.

    Args:
        path: YAML file.
        overrides: `a.b=value` strings, the value read as YAML; list items by index (`data.sources.0.path=x`).

    Raises:
        UserErrors: every mistake of the file and the overrides, each with its key path and line.
    """
    try:
        document = read_document(_read_text(Path(path)), str(path))
        data, overridden = _apply_overrides(document.data, overrides)
    except UserErrors:
        raise
    except UserError as error:
        raise UserErrors([error]) from error
    return _validate(Source(data, str(path), document.lines, overridden))


def parse_config(mapping: Mapping[str, Any], *, origin: str = NO_ORIGIN) -> RunConfig:
    """Check a configuration given as a mapping (a flow parameter, a test).

    Raises:
        UserErrors: every mistake, each with its key path; `origin` says where the mapping came from.
    """
    if not isinstance(mapping, Mapping):
        raise UserErrors(
            [
                UserError(
                    "the configuration is not a mapping of sections",
                    where=origin,
                    value=type(mapping).__name__,
                    expected="a mapping with `model` and `data`",
                )
            ]
        )
    return _validate(Source(mapping, origin))


def with_overrides(mapping: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The content of a run file with values changed as `load_config` changes them. Raises UserErrors."""
    return _apply_overrides(mapping, overrides)[0]


def config_advice(config: RunConfig) -> list[str]:
    """Sentences about settings that are allowed but probably not meant."""
    return [f"{problem.keys[0]}: {problem.what}" for problem in advice(config)]


def redacted_dump(config: RunConfig) -> dict[str, Any]:
    """The resolved configuration as plain JSON values, secrets replaced by `***`."""
    dumped: dict[str, Any] = redact(config.model_dump(mode="json"))
    return dumped


def dump_yaml(config: RunConfig) -> str:
    """The resolved configuration as YAML text that `load_config` accepts; secrets replaced by `***`."""
    return write_document(redacted_dump(config))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError("no such file", where=str(path), hint=_similar_file(path)) from None
    except IsADirectoryError:
        raise UserError("this is a folder", where=str(path), expected="a YAML file") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError("not UTF-8 text", where=f"{path}:{line}", expected="a YAML file in UTF-8") from None
    except OSError as error:
        raise UserError(f"the file cannot be read: {error.strerror}", where=str(path)) from error


def _similar_file(path: Path) -> str | None:
    names = [item.name for item in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=3)
    return f"did you mean {' or '.join(str(path.parent / name) for name in close)}?" if close else None


def _apply_overrides(
    data: Mapping[str, Any], overrides: Sequence[str]
) -> tuple[dict[str, Any], frozenset[KeyPath]]:
    result, paths, errors = copy.deepcopy(dict(data)), [], []
    for override in overrides:
        try:
            path, value = _parse_override(override)
            _set(result, path, value, override)
            paths.append(path)
        except UserError as error:
            errors.append(error)
    if errors:
        raise UserErrors(errors)
    return result, frozenset(paths)


def _parse_override(override: str) -> tuple[KeyPath, Any]:
    """`data.sources[0].path=x` as the path and the YAML value."""
    name, equals, text = override.partition("=")
    parts = _INDEX.sub(r".\1", name.strip()).split(".")
    if not equals or "" in parts:
        raise UserError(
            "an override is not of the form key.path=value",
            where="--set",
            value=name.strip() if not equals else redact({name: text})[name],
            expected="for example `--set ebft.stride=4`",
        )
    path = tuple(int(part) if part.isdigit() else part for part in parts)
    return path, read_value(text, f"--set {name.strip()}")


def _set(data: dict[str, Any], path: KeyPath, value: Any, override: str) -> None:
    """Put `value` at `path`; sections on the way that the file leaves out are made."""
    where = f"--set {override.partition('=')[0].strip()}"
    here: Any = data
    for position, part in enumerate(path):
        last = position == len(path) - 1
        parent = dotted(path[:position])
        if isinstance(here, list):
            if not isinstance(part, int) or part >= len(here):
                expected = f"an index from 0 to {len(here) - 1}" if here else "a list that is not empty"
                raise UserError(f"`{parent}` has no such item", where=where, value=part, expected=expected)
        elif not isinstance(here, dict):
            raise UserError(f"`{parent}` is a value, not a section", where=where, value=redact(here))
        elif isinstance(part, int):
            hint = f"set the whole list: `--set '{parent}=[…]'`"
            raise UserError(f"`{parent}` is not a list in the file", where=where, hint=hint)
        elif not last and (part not in here or _is_switched_off(here[part], path[: position + 1])):
            here[part] = {}
        if last:
            here[part] = value
        else:
            here = here[part]


def _is_switched_off(value: Any, path: KeyPath) -> bool:
    """A section written as `null` (or `lora: none`); setting a key below it switches it on."""
    node = schema_view.node_at(path)
    return value in (None, "none") and node is not None and schema_view.section_of(node) is not None


def _validate(source: Source) -> RunConfig:
    try:
        config = RunConfig.model_validate(source.data)
    except ValidationError as error:
        errors = problems.from_pydantic(error.errors(include_url=False), source)
        raise UserErrors([*errors.values(), *_rules_despite(errors, source)]) from None
    broken = list(broken_rules(config))
    if broken:
        raise UserErrors([_user_error(problem, source) for problem in broken])
    return config


def _rules_despite(errors: Mapping[KeyPath, UserError], source: Source) -> list[UserError]:
    """Rules broken by the keys that are well-formed, so that one pass finds every mistake."""
    data = copy.deepcopy(dict(source.data))
    for path in errors:
        _remove(data, path)
    try:
        config = RunConfig.model_validate(data)
    except ValidationError:  # a required key is missing: the rules have nothing to work on
        return []
    bad = {dotted(path) for path in errors}
    return [_user_error(problem, source) for problem in broken_rules(config) if not _touches(problem, bad)]


def _touches(problem: Problem, bad: set[str]) -> bool:
    return any(
        key == name or key.startswith((f"{name}.", f"{name}[")) for key in problem.keys for name in bad
    )


def _remove(data: dict[str, Any], path: KeyPath) -> None:
    """Take out the key at `path`; for an item of a list, the list."""
    while isinstance(path[-1], int):
        path = path[:-1]
    here: Any = data
    for part in path[:-1]:
        if part not in here and not isinstance(here, list):
            return  # a section above it is already gone
        here = here[part]
    here.pop(path[-1], None)


def _user_error(problem: Problem, source: Source) -> UserError:
    path: KeyPath = tuple(
        int(part) if part.isdigit() else part for part in _INDEX.sub(r".\1", problem.keys[0]).split(".")
    )
    return UserError(
        problem.what,
        where=source.where(path),
        value=redact(problem.value, str(path[-1])),
        expected=problem.expected,
        hint=problem.hint,
    )
