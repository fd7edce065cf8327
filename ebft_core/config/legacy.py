"""Names that axolotl, TRL and OpenRLHF use, and what to write here instead.

Nothing is translated silently: a run file that was pasted from another tool gets one error per line, and
each names our key. The tables hold only names that are not keys of this project; a key of ours in another
section is found in the schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ebft_core.config import schema_view
from ebft_core.config.legacy_names import NOT_NEEDED, RENAMED, VALUES, ValueMap
from ebft_core.config.redaction import redact
from ebft_core.config.yaml_reader import KeyPath

_REMOVED = "the line removed"
_TASKS = "evaluate.tasks"
"""Tasks have sampling settings of their own; what another tool calls so is about training."""
_FOREIGN_SECTIONS = ("trl", "rl", "datasets", "base_model", "adapter")


@dataclass(frozen=True)
class Advice:
    """What to write in place of another tool's name."""

    origin: str
    expected: str | None
    hint: str | None


def advise(path: KeyPath, value: Any) -> Advice | None:
    """Advice about an unknown key, or None if no other tool is known to use that name."""
    name = path[-1]
    if not isinstance(name, str):
        return None
    for key in (".".join(str(part) for part in path if isinstance(part, str)), name):
        if key in RENAMED:
            origin, ours, note = RENAMED[key]
            return Advice(f"a name from {origin}", _ours_with_value(ours, value, name), note)
        if key in NOT_NEEDED:
            origin, why = NOT_NEEDED[key]
            return Advice(f"a name from {origin}", _REMOVED, _with_each_line(why, value))
    prefix = next(
        (
            prefix
            for prefix in ("wandb_", "comet_", "vllm_", "fsdp_", "deepspeed_")
            if name.startswith(prefix)
        ),
        None,
    )
    if prefix is not None:
        origin, why = NOT_NEEDED[f"{prefix}*"]
        return Advice(f"a name from {origin}", _REMOVED, why)
    return None


def value_hint(path: KeyPath, value: Any) -> str | None:
    """A hint for a value that another tool gives to a key of the same name."""
    key = ".".join(str(part) for part in path if isinstance(part, str))
    try:
        return VALUES.get(key, {}).get(value)
    except TypeError:  # a list or mapping: not hashable, never in the table
        return None


def missing_hint(path: KeyPath, data: Mapping[str, Any]) -> str | None:
    """A hint for a required section that a flat file of another tool does not have."""
    if len(path) == 1 and any(name in data for name in _FOREIGN_SECTIONS):
        return "this looks like a file of another tool; the other errors name our key for each of its lines"
    examples = {
        ("model",): "model: {name_or_path: meta-llama/Llama-3.2-1B}",
        ("data",): "data: {sources: [{path: texts/*.txt}]}",
    }
    return None if path not in examples else f"for example `{examples[path]}`"


def _with_each_line(why: str, section: Any) -> str:
    """The reason, followed by what each line of a section of another tool becomes."""
    if not isinstance(section, Mapping):
        return why
    answers = [(name, _answer(str(name), value)) for name, value in section.items()]
    return "; ".join([why, *(f"`{name}` becomes `{ours}`" for name, ours in answers if ours is not None)])


def _answer(name: str, value: Any) -> str | None:
    advice = advise((name,), value)
    if advice is not None:
        return None if advice.expected == _REMOVED else advice.expected
    places = [path for path in schema_view.leaf_paths().get(name, ()) if not path.startswith(_TASKS)]
    return " or ".join(places) or None


def _ours_with_value(ours: str | ValueMap, value: Any, name: str) -> str:
    """`trainer.learning_rate: 0.0001`: our key, with the value where it can be kept as it is."""
    if not isinstance(ours, str):
        fits = [text for given, text in ours.items() if type(given) is type(value) and given == value]
        return fits[0] if fits else " or ".join(dict.fromkeys(ours.values()))
    if ours.endswith((":", "*")) or isinstance(value, Mapping | list) or value is None:
        return ours.rstrip(":*")
    shown = str(value).lower() if isinstance(value, bool) else redact(value, name)
    return f"{ours}: {shown}"
