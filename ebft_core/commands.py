"""What `ebft merge`, `evaluate` and `serve-vllm` do: the library's functions on folders, outside of a run."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from ebft_core.config import RunConfig, load_config
from ebft_core.errors import ExitCode, UserError
from ebft_core.tokenizer import Tokenizer

CHECK_PROMPTS, CHECK_TOKENS = 4, 32

OnProgress = Callable[[int, int], None]


def merge(base: Path, adapter: Path, output: Path, *, check: bool) -> None:
    """Merge `adapter` into `base`, write the model to `output`, and compare logits.

    Raises:
        UserError: a folder is missing or unsuitable, or `output` exists.
        RuntimeError: the merged model does not compute what base and adapter compute.
    """
    from ebft_core.lora_merge import check_merge, merge_adapter

    console = Console(stderr=True)
    _must_be_folder(base, "--base")
    _must_be_folder(adapter, "--adapter")
    with _progress(console, "merging") as on_progress:
        report = merge_adapter(base, adapter, output, progress=on_progress)
    console.print(
        f"{report.merged_tensors} tensors merged, {report.shards} weight file(s), {report.bytes / 1e9:.2f} GB"
    )
    if not report.digest_checked:
        console.print("the adapter does not record its base, so nothing says that this is the right one")
    if check:
        result = check_merge(base, adapter, output, prompts_ids=_prompts(base))
        console.print(
            f"checked on {result.prompts} prompts: distance of the logits {result.error:.1e}, "
            f"the adapter's own effect {result.effect:.1e}"
        )
    console.print(f"model: {output}")


def evaluate(
    model: Path, baseline: Path, config: RunConfig, *, output: Path | None, as_json: bool = False
) -> None:
    """Compare two model folders on the held-out rows of `config.data`; print a table or JSON.

    Unless `evaluate.heldout` names frozen ones, the rows are tokenized anew with the baseline's tokenizer;
    the held-out documents are those that a run with this configuration holds out.

    Raises:
        UserError: a folder is missing or unsuitable, bad data, or models with different vocabularies.
    """
    from ebft_core.data.heldout import HELDOUT, frozen_heldout
    from ebft_core.data.stop_tokens import read_stop_token_ids
    from ebft_core.data.store import read_rows
    from ebft_core.evaluation import compare_models, print_table
    from ebft_core.evaluation.downstream.check import check_tasks
    from ebft_core.evaluation.outside import digest_outside
    from ebft_core.manifests import write_json_atomic
    from ebft_core.tokenizer import load_tokenizer

    _must_be_folder(model, "--model")
    _must_be_folder(baseline, "--baseline")
    if output is not None:
        _must_be_folder(output.absolute().parent, "--output")
    digest_outside(config)
    check_tasks(config)
    console = Console(stderr=True)
    tokenizer = load_tokenizer(baseline, config.model)
    with tempfile.TemporaryDirectory(prefix="ebft-evaluate-") as scratch:
        frozen = frozen_heldout(config, tokenizer)
        if frozen is None:
            with console.status("tokenizing the held-out documents"):
                rows, stops = _tokenize(baseline, tokenizer, config, Path(scratch))
        else:
            rows = frozen / HELDOUT
            stops = read_stop_token_ids(frozen) if config.ebft.mode == "structured" else []
        with _progress(console, "evaluating") as on_progress:
            comparison = compare_models(
                baseline,
                model,
                read_rows(rows),
                config,
                stop_token_ids=stops,
                progress=on_progress,
            )
    document = comparison.evaluation.to_json()
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        print_table(comparison.evaluation, Console())
    if output is not None:
        write_json_atomic(output, document)


def serve_vllm(
    config: Path | None, run_dir: Path | None, model: Path | None, port: int | None, overrides: Sequence[str]
) -> ExitCode:
    """Keep a vLLM server: of a planned run (`run_dir`, as the flow does it) or of a run file alone.

    Raises:
        UserError: neither or both are given, or the server cannot start.
        ServerLost: it died or hung too often.
    """
    from ebft_core.vllm.serve import serve_alone, serve_run
    from ebft_core.vllm.state import ServerState

    alone = [name for name, value in (("--model", model), ("--port", port), ("--set", overrides)) if value]
    if (config is None) == (run_dir is None) or (run_dir is not None and alone):
        raise UserError(
            "what to serve is not clear",
            where="serve-vllm",
            expected="either a run file, or --run-dir alone with the folder of a planned run",
        )
    if run_dir is not None:
        return serve_run(run_dir)
    assert config is not None  # one of the two is given
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def show(state: ServerState) -> None:
        console.print(f"server  {state.url}/v1", markup=False)
        console.print(f"model   {state.model_name}", markup=False)
        console.print(f"log     {state.log}", markup=False)
        console.print("Ctrl-C stops it")

    console.print("starting vLLM")
    serve_alone(load_config(config, overrides), model=model, port=port, on_ready=show)
    console.print("stopped")
    return ExitCode.DONE


def _tokenize(
    baseline: Path, tokenizer: Tokenizer, config: RunConfig, scratch: Path
) -> tuple[Path, list[int]]:
    """The folder of the held-out rows, and the tokens that end a completion."""
    from ebft_core.base_model import embedding_size
    from ebft_core.data.pipeline import HELDOUT, DataPipeline
    from ebft_core.events import EventWriter
    from ebft_core.stop import StopSignal

    events = EventWriter(None, "evaluate")
    pipeline = DataPipeline(config, tokenizer, embedding_size(baseline), events=events, stop=StopSignal())
    pipeline.write(scratch / "rows", scratch / "work")
    return scratch / "rows" / HELDOUT, pipeline.maker.stop_ids if pipeline.maker else []


def _prompts(base: Path) -> list[list[int]]:
    """Arbitrary tokens: that two models compute the same does not depend on what they read."""
    from transformers import AutoConfig

    vocabulary = AutoConfig.from_pretrained(base, local_files_only=True).get_text_config().vocab_size
    rng = random.Random(0)
    return [[rng.randrange(vocabulary) for _ in range(CHECK_TOKENS)] for _ in range(CHECK_PROMPTS)]


def _must_be_folder(path: Path, option: str) -> None:
    if not path.is_dir():
        raise UserError("no such folder", where=option, value=str(path), expected="a local folder")


@contextmanager
def _progress(console: Console, label: str) -> Iterator[OnProgress]:
    """A progress bar; the callback takes (done, in all)."""
    columns = (TextColumn(label), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
