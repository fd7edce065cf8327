"""`ebft serve-vllm`: the keeper as a program, for a planned run (the flow starts it) or alone."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from ebft_core.base_model import BaseModelInfo, check_model_folder, digest_model_folder, read_base
from ebft_core.config import RunConfig, load_config
from ebft_core.errors import ExitCode, UserError
from ebft_core.events import EventWriter
from ebft_core.manifests import verify_folder
from ebft_core.runs import StagePlan, plan_run, read_plan
from ebft_core.stop import StopSignal, install_stop
from ebft_core.vllm.keeper import Keeper
from ebft_core.vllm.spec import make_spec
from ebft_core.vllm.state import ServerState, server_folder

logger = logging.getLogger(__name__)

EVENTS = "vllm"
"""The keeper's journal is `events/vllm.jsonl` in the run's folder."""
ALONE = "serve"
"""Folder of the workspace for servers without a run."""


def serve_run(run_dir: Path) -> ExitCode:
    """Keep the server of a planned run until SIGTERM or the end of standard input.

    Returns:
        0 stopped on request, 78 an error the user can mend, 70 anything else; the journal says why.
    """
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    faulthandler.enable()
    stop = StopSignal()
    install_stop(stop)
    run_dir = run_dir.resolve()
    plan = read_plan(run_dir)
    events = EventWriter(run_dir / "events" / f"{EVENTS}.jsonl", EVENTS)
    try:
        os.chdir(plan.working_dir)  # relative paths mean the folder the run was started in
        config = load_config(run_dir / "config.yaml")
        spec = make_spec(config, *_weights(_made_by(plan.start)))
        Keeper(spec, server_folder(run_dir), events=events, stop=stop).run()
    except UserError as error:
        events.error({**error.to_json(), "text": error.render()})
        logger.error("%s", error.render())
        return ExitCode.BAD_INPUT
    except Exception as error:  # the end of a program: reported in full, and said by the exit code
        events.error({"what": f"{type(error).__name__}: {error}", "where": "vLLM server"})
        logger.exception("the keeper of the vLLM server failed")
        return ExitCode.INTERNAL
    return ExitCode.DONE


def serve_alone(
    config: RunConfig, *, model: Path | None, port: int | None, on_ready: Callable[[ServerState], None]
) -> None:
    """Keep a server for a run file until SIGTERM or Ctrl-C.

    Args:
        config: the run file; its data are not read.
        model: folder of the weights; None: the run's base model.
        port: None takes a free one.
        on_ready: called whenever the server has become ready.

    Raises:
        UserError: anything the user can mend.
        ServerLost: it died or hung too often.
    """
    if config.vllm.url is not None:
        raise UserError(
            "`vllm.url` names a server that runs already",
            where="vllm.url",
            value=config.vllm.url,
            expected="null",
            hint="`--set vllm.url=null` starts one here",
        )
    stop = StopSignal()
    install_stop(stop)
    spec = make_spec(config, *(_weights(_base(config)) if model is None else _folder(model)))
    folder = server_folder(Path(config.local_workspace).expanduser().resolve() / ALONE / config.name)
    Keeper(spec, folder, events=EventWriter(None, EVENTS), stop=stop, on_ready=on_ready).run(port)


def _made_by(stage: StagePlan) -> BaseModelInfo:
    """The model that a stage left. Raises UserError if the stage is not done."""
    if verify_folder(stage.output) is None:
        raise UserError(
            f"stage {stage.name} is not done yet",
            where=str(stage.output),
            hint="`ebft run` prepares it; for a server alone, `--model FOLDER` names the weights",
        )
    return read_base(stage.output)


def _base(config: RunConfig) -> BaseModelInfo:
    if config.model.from_scratch is None:
        from ebft_core.stages.prepare_base import resolve_base

        return resolve_base(config.model)
    return _made_by(plan_run(config).stage("prepare_base"))


def _weights(base: BaseModelInfo) -> tuple[Path, str]:
    return base.path, base.digest


def _folder(model: Path) -> tuple[Path, str]:
    if not model.is_dir():
        raise UserError("no such folder", where="--model", value=str(model), expected="a local folder")
    check_model_folder(model, where="--model")
    return model.resolve(), digest_model_folder(model)
