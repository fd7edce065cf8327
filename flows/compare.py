"""The flow `ebft-compare`: EBFT, SFT and the base on the same data, budget and held-out rows."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.arm_group import run_group
from tasks.flow_names import group_run_name
from tasks.start_group import request_comparison


@flow(name="ebft-compare", flow_run_name=group_run_name, persist_result=False, result_serializer="json")
def ebft_compare(
    config: str | dict[str, Any],
    overrides: list[str] | None = None,
    arms: list[str] | None = None,
    own_arms: dict[str, list[str]] | None = None,
    max_steps: int | None = None,
    max_seconds: float | None = None,
) -> dict[str, Any]:
    """Train every arm with the same budget, one after the other, and measure all of them together.

    Args:
        config, overrides: as flow `ebft` takes them.
        arms: some of `base`, `sft`, `ebft`, `ebft+ce` and `sft+ebft`; unset: those of `compare.arms`.
        own_arms: name → changes of the run file, for example `{"n8": ["ebft.n_samples_per_prompt=8"]}`.
        max_steps, max_seconds: the budget, one of them; unset: that of the run file's trainer.

    Returns:
        As `run_group`.
    """
    request = request_comparison(
        config,
        overrides or [],
        arms=arms,
        own_arms=own_arms,
        max_steps=max_steps,
        max_seconds=max_seconds,
    )
    return run_group(request, parallel=1)  # a budget of seconds must not be shared with another arm
