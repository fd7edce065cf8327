"""What runs inside the sandbox: a generated program, then its tests. Standard library only.

The source of this file is given to an interpreter (`python -c`), because nothing of the project can be seen
there. It reads a job from its standard input, bounds itself, and reports over a pipe that nothing else
writes to, one JSON document per line:

    {"event": "start"}                                   before anything generated runs
    {"event": "check", "number", "left", "right"}        the sides of a comparison, encoded
    {"event": "error", "text"}                           an exception that nobody caught
    {"event": "end"}                                     the tests have run to their end

Generated code shares this process and may write such lines as well, but it cannot know what is expected:
that stays outside, and so does the comparison.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

CHECK = "__ebft_check__"
"""Name of the function that the tests call with the sides of a comparison."""

_ERROR_CHARACTERS = 300


def main() -> None:
    """Run the job on standard input."""
    job = json.load(sys.stdin)
    for name, bound in job["limits"].items():
        resource.setrlimit(getattr(resource, name), (bound, bound))
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    report = reporter(job["reports"])

    def failed(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
        report({"event": "error", "text": f"{kind.__name__}: {error}"[:_ERROR_CHARACTERS]})

    def check(number: int, left: object, right: object) -> None:
        report({"event": "check", "number": number, "left": encode(left), "right": encode(right)})

    sys.excepthook = failed
    report({"event": "start"})
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(job["program"], "program", "exec"), names)
    names[CHECK] = check
    exec(compile(job["tests"], "tests", "exec"), names)
    report({"event": "end"})


def reporter(stream: int) -> Callable[[dict[str, Any]], None]:
    """A function that writes one report to the file descriptor `stream`."""

    def report(document: dict[str, Any]) -> None:
        data = json.dumps(document).encode() + b"\n"
        while data:
            data = data[os.write(stream, data) :]

    return report


def encode(value: object) -> Any:
    """A plain value as JSON that keeps its type; anything else by the name of its type."""
    kind = type(value)
    if kind in (bool, str, type(None)):
        return value
    if kind in _NUMBERS:
        return [kind.__name__, _NUMBERS[kind](value)]
    if kind in (list, tuple, set, frozenset):
        return [kind.__name__, [encode(item) for item in value]]  # type: ignore[attr-defined]
    if kind is dict:
        return ["dict", [[encode(key), encode(item)] for key, item in value.items()]]  # type: ignore[attr-defined]
    return ["object", kind.__name__]


_NUMBERS: dict[type, Callable[[Any], Any]] = {
    int: hex,
    float: float.hex,
    complex: lambda number: [number.real.hex(), number.imag.hex()],
    bytes: bytes.hex,
}

if __name__ == "__main__":
    main()
