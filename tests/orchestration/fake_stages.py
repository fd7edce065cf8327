"""Stages without torch, one per behaviour that a supervisor must cope with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

from ebft_core.errors import UserError
from ebft_core.manifests import commit_folder
from ebft_core.stage_runner import Preempted, StageContext


def run(context: StageContext) -> dict[str, Any]:
    """Do what `EBFT_FAKE_BEHAVIOUR` says."""
    behaviour = os.environ["EBFT_FAKE_BEHAVIOUR"]
    context.events.message(f"pid {os.getpid()}")
    result = BEHAVIOURS[behaviour](context)
    return {} if result is None else result


def work(context: StageContext) -> dict[str, Any]:
    """Count to three, keeping count in the work folder."""
    for step in range(1, 4):
        context.events.metrics(step, {"ebft/reward": step / 2}, total=3)
    (context.output / "result.txt").write_text(context.config.name, encoding="utf-8")
    return {"steps": 3}


def listen(context: StageContext) -> None:
    """Run until asked to stop, then leave a checkpoint."""
    context.events.progress("wait", 1, 2, "steps")
    while not context.stop.requested:
        time.sleep(0.01)
    (context.work / "checkpoint").write_text(context.stop.reason, encoding="utf-8")
    raise Preempted("asked to")


def save(context: StageContext) -> None:
    """Go on from the newest checkpoint, commit the next one, and run until asked to stop."""
    root = context.work / "checkpoints"
    step = 1 + max((int(path.name.split("-")[1]) for path in root.glob("checkpoint-*")), default=0)
    staging = root / ".staging-next"
    staging.mkdir(parents=True)
    (staging / "weights").write_text(str(step), encoding="utf-8")
    commit_folder(staging, root / f"checkpoint-{step}", schema="fake/1", meta={"step": step})
    context.events.metrics(step, {"ebft/reward": step / 2}, total=3)
    listen(context)


def ignore(context: StageContext) -> None:
    """Never look at the stop signal, and start a child that ignores signals too."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code])
    context.events.message(f"pid {child.pid}")
    context.events.progress("wait", 1, 2, "steps")
    time.sleep(600)


def refuse(context: StageContext) -> None:
    """Bad input."""
    raise UserError("stride is 0", where="ebft.stride", value=0, expected="at least 1", hint="use 8")


def crash(context: StageContext) -> None:
    """A bug."""
    raise RuntimeError("the flux is off")


def die(context: StageContext) -> None:
    """What the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


BEHAVIOURS = {f.__name__: f for f in (work, listen, save, ignore, refuse, crash, die)}
