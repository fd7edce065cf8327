"""Settings of the whole test suite: one thread, no network, GPU tests only where there is a GPU."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

# Libraries read these when they are imported, so they are set before any import of them.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    DO_NOT_TRACK="1",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    MLFLOW_DISABLE_TELEMETRY="true",
    TOKENIZERS_PARALLELISM="false",
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs deaf to Ctrl-C, and the programs that tests interrupt would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest


def _interpret_triton() -> None:
    """Run Triton kernels in its interpreter, in this process only.

    Triton decides when a kernel, or its own library, is imported, so this comes first. The environment
    is left as it was: servers and stage programs that tests start would inherit it.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    from triton import knobs

    knobs.propagate_env = False
    knobs.runtime.interpret = True
    del os.environ["TRITON_INTERPRET"]


if not Path("/dev/nvidiactl").exists() and importlib.util.find_spec("triton"):
    _interpret_triton()


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    """One thread per process (tests are spread over processes); same examples in every hypothesis run."""
    import torch
    from hypothesis import settings

    torch.set_num_threads(1)
    settings.register_profile("ebft", deadline=None, derandomize=True, max_examples=50, print_blob=True)
    settings.load_profile("ebft")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on machines without CUDA."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
