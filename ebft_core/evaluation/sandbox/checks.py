"""Tests as assertions: what goes into the sandbox, what stays outside, and the comparison.

Every `assert LEFT op RIGHT` of a test becomes a report of its sides. A side that is a literal, in
`assert add(1, 2) == 3` the 3, never enters the sandbox; the other side comes out as a plain value (numbers,
text, lists, tuples, sets, mappings of these). An assertion of another form is one that its truth is True.
So an object that claims to equal everything, a printed "passed" or an early exit with status 0 pass nothing.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ebft_core.evaluation.sandbox.harness import CHECK

_OPERATORS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
}
_SINGLE_OPERATOR = 1


class _Outside:
    """Stands for the value of a side that is not a literal."""


@dataclass(frozen=True)
class Check:
    """One assertion.

    Attributes:
        text: as it was written.
        compare: applied to the values of both sides.
        left, right: the literals; `_Outside` where the value comes out of the sandbox.
        required: it must be reached, as everything but `assert False` and its like.
    """

    text: str
    compare: Callable[[Any, Any], Any]
    left: Any
    right: Any
    required: bool

    def holds(self, left: Any, right: Any) -> bool:
        """Whether the assertion is true of these encoded values.

        Raises:
            ValueError: a value is not plain.
        """
        sides = [
            decode(found) if kept is _Outside else kept
            for kept, found in ((self.left, left), (self.right, right))
        ]
        try:
            return bool(self.compare(*sides))
        except TypeError:  # `3 < "a"`: the assertion would have failed with this error
            return False


@dataclass(frozen=True)
class Checks:
    """The tests of a problem.

    Attributes:
        written: as they stand in the file.
        source: for the sandbox: reports in place of the assertions.
        checks: the assertions, by the number in their reports.
    """

    written: str
    source: str
    checks: Sequence[Check] = field(repr=False)


def parse_tests(source: str) -> Checks:
    """Take the assertions out of the source of tests.

    Raises:
        ValueError: the source is not Python, or asserts nothing.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"the tests are not Python: {error}") from error
    reporting = _Reporting()
    tree = ast.fix_missing_locations(reporting.visit(tree))
    if not any(check.required for check in reporting.checks):
        raise ValueError("the tests assert nothing")
    return Checks(source, ast.unparse(tree), reporting.checks)


def decode(value: Any) -> Any:
    """The plain value that `harness.encode` wrote.

    Raises:
        ValueError: not a plain value, or not something that `encode` writes.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if not (isinstance(value, list) and len(value) == 2 and value[0] in _DECODERS):
        kind = value[1] if isinstance(value, list) and len(value) == 2 else value
        raise ValueError(f"a value of type {str(kind)[:80]} cannot be compared outside")
    try:
        return _DECODERS[value[0]](value[1])
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError("a report that the harness does not write") from error


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "complex": lambda pair: complex(*map(float.fromhex, pair)),
    "bytes": bytes.fromhex,
    "list": lambda items: [decode(item) for item in items],
    "tuple": lambda items: tuple(decode(item) for item in items),
    "set": lambda items: {decode(item) for item in items},
    "frozenset": lambda items: frozenset(decode(item) for item in items),
    "dict": lambda pairs: {decode(key): decode(item) for key, item in pairs},
}


class _Reporting(ast.NodeTransformer):
    """Puts a report in place of every assertion."""

    def __init__(self) -> None:
        self.checks: list[Check] = []

    def visit_Assert(self, node: ast.Assert) -> ast.Expr:
        """`assert LEFT op RIGHT` as `CHECK(number, LEFT, RIGHT)`."""
        test = node.test
        if isinstance(test, ast.Compare) and len(test.ops) == _SINGLE_OPERATOR:
            left, right, compare = test.left, test.comparators[0], _OPERATORS[type(test.ops[0])]
        else:
            left, right, compare = _truth(test), ast.Constant(True), operator.eq
        kept_left, kept_right = _literal(left), _literal(right)
        required = kept_left is _Outside or kept_right is _Outside
        number = len(self.checks)
        self.checks.append(Check(ast.unparse(node), compare, kept_left, kept_right, required))
        sides = [
            side if kept is _Outside else ast.Constant(None)
            for side, kept in ((left, kept_left), (right, kept_right))
        ]
        call = ast.Call(ast.Name(CHECK, ast.Load()), [ast.Constant(number), *sides], [])
        return ast.copy_location(ast.Expr(call), node)


def _truth(node: ast.expr) -> ast.expr:
    """`not not node`, worked out where it is a literal."""
    value = _literal(node)
    if value is _Outside:
        return ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), node))
    return ast.Constant(bool(value))


def _literal(node: ast.expr) -> Any:
    """The value of a literal; `_Outside` for anything else."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _Outside
