"""A configuration that was written out loads as the same configuration."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebft_core.config import RunConfig, load_config, parse_config
from ebft_core.config.loading import dump_yaml

_names = st.text(min_size=1).filter(str.strip)


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    """Valid configurations with awkward texts and numbers."""
    fractions = st.floats(0, 1, exclude_min=True)
    ebft = {
        "stride": draw(st.integers(1, 10**6)),
        "temperature": draw(st.floats(1e-300, 1e300)),
        "feature_layers": draw(st.lists(fractions, min_size=1, max_size=4)),
        "whitening": draw(st.sampled_from(["feature", "sample", "none"])),
    }
    trainer = {
        "learning_rate": draw(st.floats(1e-12, 10)),
        "num_train_epochs": draw(st.none() | st.floats(0.1, 50)),
    }
    lora = draw(
        st.none()
        | st.fixed_dictionaries({"r": st.integers(1, 512), "target_modules": st.lists(_names, min_size=1)})
    )
    data = {
        "sources": [
            {"path": path}
            for path in draw(st.lists(_names | st.sampled_from(["1e-5", "no", "~"]), min_size=1))
        ],
        "chat": {"template_kwargs": draw(st.dictionaries(_names, st.booleans() | st.integers() | st.text()))},
    }
    model = {"name_or_path": draw(_names)}
    return parse_config({"model": model, "data": data, "ebft": ebft, "trainer": trainer, "lora": lora})


@given(configs())
def test_a_dumped_configuration_loads_equal(
    tmp_path_factory: pytest.TempPathFactory, config: RunConfig
) -> None:
    file = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    file.write_text(dump_yaml(config), encoding="utf-8", newline="")
    assert load_config(file) == config
