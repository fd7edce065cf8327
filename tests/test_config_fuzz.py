"""Whatever a configuration holds, the answer is a `RunConfig` or `UserErrors`, never another exception."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebft_core.config import RunConfig, load_config, parse_config
from ebft_core.config.legacy_names import NOT_NEEDED, RENAMED
from ebft_core.config.schema_view import leaf_paths
from ebft_core.config.yaml_reader import write_document
from ebft_core.errors import UserErrors

VALID: dict[str, Any] = {
    "model": {"name_or_path": "m", "from_scratch": None},
    "data": {"sources": [{"path": "a"}, {"path": "b"}], "chat": {"template_kwargs": {"x": True}}},
    "ebft": {"feature_layers": [0.5, 1.0], "stride": 4},
    "trainer": {"batch_size": 4, "micro_batch_size": 2},
    "lora": {"target_modules": ["q_proj"]},
    "evaluate": {"tasks": [{"type": "exact_match", "name": "a", "file": "b"}], "against": {"c": "d"}},
    "tracking": {"tags": {"a": "b"}},
}
_keys = (
    st.sampled_from(sorted({*leaf_paths(), *RENAMED, *(name.rstrip("*") + "x" for name in NOT_NEEDED)}))
    | st.text()
)
_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["none", "1e-5"])
)
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3),
    max_leaves=8,
)


def _containers(value: Any) -> list[Any]:
    below = value.values() if isinstance(value, dict) else value
    return [value, *(found for item in below if isinstance(item, dict | list) for found in _containers(item))]


@st.composite
def damaged(draw: st.DrawFn) -> dict[str, Any]:
    """The valid mapping with one to four places overwritten, added to or removed."""
    data = copy.deepcopy(VALID)
    for _ in range(draw(st.integers(1, 4))):
        here = draw(st.sampled_from(_containers(data)))
        if isinstance(here, list):
            here[draw(st.integers(0, len(here))) :] = [draw(_values)]
        elif here and draw(st.booleans()):
            here[draw(st.sampled_from(sorted(here)))] = draw(_values)
        else:
            here[draw(_keys)] = draw(_values)
    return data


def check(load: Callable[[], RunConfig]) -> None:
    """`load` gives a configuration, or errors that each say what and where."""
    try:
        outcome: RunConfig | UserErrors = load()
    except UserErrors as error:
        outcome = error
    if isinstance(outcome, UserErrors):
        assert outcome.errors
        assert all(error.what and error.where is not None for error in outcome.errors)
        assert outcome.render().count("error: ") >= len(outcome.errors)


@given(damaged())
def test_any_mapping(data: dict[str, Any]) -> None:
    before = repr(data)
    check(lambda: parse_config(data))
    assert repr(data) == before  # the caller's mapping is left alone


@given(data=damaged(), seed=st.integers(0, 2**32))
def test_any_file_cut_or_garbled(
    tmp_path_factory: pytest.TempPathFactory, data: dict[str, Any], seed: int
) -> None:
    rng = random.Random(seed)
    whole = write_document(data)
    place = rng.randrange(len(whole))
    scrap = rng.choice(["", "\t", ": ", "[", "}", "\n", "&a ", "*a", "!!x ", "'", '"', "\x00", "é", "- "])
    file: Path = tmp_path_factory.getbasetemp() / "garbled.yaml"
    file.write_text(whole[:place] + scrap + whole[place + rng.randrange(5) :], encoding="utf-8")
    section = rng.choice(["ebft", "lora", "data.sources.0", "x"])
    check(lambda: load_config(file, [f"{section}.{rng.choice(['r', 'path'])}={seed}"]))


@pytest.mark.parametrize("value", [None, [], "model", 3])
def test_no_mapping_at_all(value: Any) -> None:
    with pytest.raises(UserErrors, match="not a mapping"):
        parse_config(value)
