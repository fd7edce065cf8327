"""The examples in the docstrings of the public functions run and print what they show."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys

import pytest

import ebft_core

PUBLIC = (
    "place_anchors",
    "rollout",
    "packed_logprobs",
    "extract_features",
    "group_rewards",
    "group_advantages",
)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_function_has_a_running_example(name: str) -> None:
    function = getattr(ebft_core, name)
    module = importlib.import_module(function.__module__)
    (found,) = [
        t for t in doctest.DocTestFinder().find(function, name, globs=vars(module).copy()) if t.examples
    ]
    report: list[str] = []
    result = doctest.DocTestRunner().run(found, out=report.append)
    assert result.attempted > 0
    assert result.failed == 0, "".join(report)


def test_torch_is_imported_only_when_a_name_is_touched() -> None:
    code = (
        "import sys, ebft_core; assert 'torch' not in sys.modules; "
        "ebft_core.place_anchors; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'roll_out'"):
        ebft_core.roll_out  # noqa: B018
