"""Functions that a run file names as `module:function`: where their file is, and importing them.

Modules are looked up in the working directory and in the environment. Torch-free: the planner needs the
files for its digests.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ebft_core.errors import UserError


def module_file(module_name: str, *, where: str, expected: str) -> Path:
    """The file that holds a module.

    Args:
        where: config key that names the module. expected: what that key takes.

    Raises:
        UserError: there is no such module.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a module beside the run file
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError) as error:
        raise UserError("no such module", where=where, value=module_name, hint=str(error)) from error
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise UserError(
            "no such module",
            where=where,
            value=module_name,
            expected=expected,
            hint=f"modules are looked up in {os.getcwd()} and in the environment",
        )
    return Path(spec.origin)


def import_function(name: str, *, what: str, where: str, expected: str, signature: str) -> Callable[..., Any]:
    """Import `module:function`.

    Args:
        what: what the function is, for messages. signature: what it looks like.

    Raises:
        UserError: no such module or function, or an error while importing it.
    """
    module_name, _, function_name = name.partition(":")
    module_file(module_name, where=where, expected=expected)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises is the user's to mend
        raise UserError(
            f"the {what}'s module does not import",
            where=where,
            value=name,
            hint=f"{type(error).__name__}: {error}",
        ) from error
    function = vars(module).get(function_name)
    if not callable(function):
        raise UserError("the module has no such function", where=where, value=name, expected=signature)
    return function
