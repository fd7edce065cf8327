"""Rewards of the user's own beside the feature reward: `rewards: [{module: my_rewards:accuracy}]`.

The functions have the signature of TRL's `reward_funcs`. Each is called once per batch of groups with
keyword arguments, one list entry per completion: `prompts`, `completions`, `completion_ids`, every column of
the data set, and the helpers `trainer_state`, `log_extra(column, values)` and `log_metric(name, value)`. It
returns one number per completion, or None where it has nothing to say; it may be a coroutine function.

Torch-free but for `combine_own`, because the planner digests the functions' files.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsFloat

from ebft_core.errors import UserError
from ebft_core.manifests import sha256_file
from ebft_core.user_code import import_function, module_file

if TYPE_CHECKING:
    from torch import Tensor

    from ebft_core.config import OwnRewardConfig

Rewards = list[float | None]
"""One entry per completion; None: the function does not apply to it."""

_SIGNATURE = "function(prompts, completions, completion_ids, **columns) -> list of numbers or None"
_EXPECTED = "an importable `module:function`"
_ALWAYS_PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


@dataclass(frozen=True)
class OwnRewardOutput:
    """What the functions returned for a batch of X completions.

    Attributes:
        rewards: one list of X values per function, in the order of the run file.
        metrics: mean of what the functions gave to `log_metric`, by name.
        extra: what they gave to `log_extra`, by column: X values each.
    """

    rewards: list[Rewards]
    metrics: dict[str, float]
    extra: dict[str, list[Any]]


@dataclass(frozen=True)
class _Function:
    where: str
    name: str
    call: Callable[..., Any]
    is_async: bool
    required: frozenset[str]


def fingerprint_rewards(configs: Sequence[OwnRewardConfig]) -> list[str]:
    """Digests of the files that hold the functions, in their order.

    Raises:
        UserError: there is no such module.
    """
    return [
        sha256_file(module_file(config.module.partition(":")[0], where=_where(i), expected=_EXPECTED))
        for i, config in enumerate(configs)
    ]


class OwnRewards:
    """The reward functions of a run, imported once.

    Args:
        configs: section `rewards` of the run file.

    Raises:
        UserError: no such module or function, an error while importing it, or a function that cannot be
            called the way TRL calls one.
    """

    def __init__(self, configs: Sequence[OwnRewardConfig]) -> None:
        self._functions = [_load(config.module, _where(i)) for i, config in enumerate(configs)]
        self.weights = [config.weight for config in configs]
        self.names = [function.name for function in self._functions]
        # One loop for the whole run: clients that coroutines keep between calls are bound to their loop.
        self._runner = asyncio.Runner()
        weakref.finalize(self, self._runner.close)

    def __len__(self) -> int:
        return len(self._functions)

    def score(
        self,
        *,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        trainer_state: Any = None,
    ) -> OwnRewardOutput:
        """Call every function once. Coroutine functions run at the same time; calls must not overlap.

        Args:
            prompts, completions: texts, or lists of messages; one per completion, so a prompt is repeated.
            columns: further columns of the data set, one value per completion.

        Raises:
            UserError: a function fails, asks for a column that is not there, returns anything but one finite
                number or None per completion, or fills a column with anything but one entry for each.
        """
        metrics: defaultdict[str, list[float]] = defaultdict(list)
        extra: defaultdict[str, list[Any]] = defaultdict(list)
        arguments = {
            **{name: list(values) for name, values in columns.items()},
            "prompts": list(prompts),
            "completions": list(completions),
            "completion_ids": [list(ids) for ids in completion_ids],
            "trainer_state": trainer_state,
            "log_extra": lambda column, values: extra[column].extend(values),
            "log_metric": lambda name, value: metrics[name].append(float(value)),
        }
        for function in self._functions:
            _check_columns(function, arguments)
        results = self._call_all(arguments)
        rewards = [
            _check_result(function, result, len(completions))
            for function, result in zip(self._functions, results, strict=True)
        ]
        for column, values in extra.items():
            _check_column(column, values, len(completions))
        means = {name: sum(values) / len(values) for name, values in metrics.items()}
        return OwnRewardOutput(rewards, means, dict(extra))

    def _call_all(self, arguments: Mapping[str, Any]) -> list[Any]:
        waiting = [_await(function, arguments) for function in self._functions if function.is_async]
        results = iter(self._runner.run(_gather(waiting)) if waiting else [])
        return [next(results) if f.is_async else _call(f, arguments) for f in self._functions]


def combine_own(rewards: Sequence[Rewards], weights: Sequence[float], shape: tuple[int, ...] | Any) -> Tensor:
    """Weighted sum of the functions' rewards, float32 in `shape`; NaN where no function applies.

    Args:
        rewards: one list per function, in the flattened order of `shape`, usually (R, A, N).

    Example:
        >>> combine_own([[1.0, None, None], [1.0, 2.0, None]], [0.5, 1.0], (3,))
        tensor([1.5000, 2.0000,    nan])
    """
    import torch

    values = torch.tensor(
        [[math.nan if value is None else value for value in row] for row in rewards], dtype=torch.float32
    )
    total = (values * torch.tensor(weights, dtype=torch.float32)[:, None]).nansum(dim=0)
    return torch.where(values.isnan().all(dim=0), math.nan, total).reshape(shape)


def _where(index: int) -> str:
    return f"rewards[{index}].module"


def _load(name: str, where: str) -> _Function:
    function = import_function(
        name, what="reward function", where=where, expected=_EXPECTED, signature=_SIGNATURE
    )
    parameters = list(_parameters(function, name, where))
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise UserError(
            "the reward function takes other arguments",
            where=where,
            value=name,
            expected=_SIGNATURE,
            hint="add **kwargs: columns and helpers that it does not read are passed as well",
        )
    required = frozenset(
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    )
    return _Function(where, name, function, _is_async(function), required)


def _parameters(function: Callable[..., Any], name: str, where: str) -> Iterable[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise UserError(
            "the reward function has no signature to read", where=where, value=name, expected=_SIGNATURE
        ) from error
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        raise UserError(
            "the reward function takes other arguments",
            where=where,
            value=name,
            expected=_SIGNATURE,
            hint="it is called with keyword arguments only",
        )
    return parameters


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__  # a callable object
    )


def _check_columns(function: _Function, arguments: Mapping[str, Any]) -> None:
    missing = sorted(function.required - set(arguments))
    if missing:
        columns = sorted(set(arguments) - set(_ALWAYS_PASSED))
        raise UserError(
            "the reward function asks for columns that the data set does not have",
            where=function.where,
            value=f"{function.name}: {', '.join(missing)}",
            expected=f"columns among: {', '.join(columns) or 'none'}",
        )


def _check_column(column: str, values: Sequence[Any], count: int) -> None:
    if len(values) != count:
        raise UserError(
            "a reward function filled a column with another number of entries than there are completions",
            where="rewards",
            value=f"log_extra({column!r}, …): {len(values)} entries for {count} completions",
            expected="one entry per completion, in their order",
        )


def _call(function: _Function, arguments: Mapping[str, Any]) -> Any:
    try:
        return function.call(**arguments)
    except Exception as error:  # whatever the user's function raises is the user's to mend
        raise _failed(function, error) from error


async def _await(function: _Function, arguments: Mapping[str, Any]) -> Any:
    try:
        return await function.call(**arguments)
    except Exception as error:  # as in `_call`
        raise _failed(function, error) from error


async def _gather(waiting: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    return list(await asyncio.gather(*waiting))


def _failed(function: _Function, error: Exception) -> UserError:
    return UserError(
        "the reward function failed",
        where=function.where,
        value=function.name,
        hint=f"{type(error).__name__}: {error}; return None for a completion that cannot be judged",
    )


def _check_result(function: _Function, result: Any, count: int) -> Rewards:
    if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
        raise _bad_result(function, type(result).__name__, "a list")
    values = list(result)
    if len(values) != count:
        raise _bad_result(
            function, f"{len(values)} rewards for {count} completions", "one entry per completion"
        )
    return [_number(function, value, i) for i, value in enumerate(values)]


def _number(function: _Function, value: Any, index: int) -> float | None:
    if value is None:
        return None
    try:
        number = float(value) if isinstance(value, SupportsFloat) else math.nan
    except (TypeError, ValueError, RuntimeError):  # an array or a tensor of several numbers
        number = math.nan
    if not math.isfinite(number):
        raise _bad_result(function, f"{value!r} for completion {index}", "finite numbers, or None")
    return number


def _bad_result(function: _Function, got: str, expected: str) -> UserError:
    return UserError(
        "the reward function returned something else than rewards",
        where=function.where,
        value=f"{function.name}: {got}",
        expected=expected,
    )
