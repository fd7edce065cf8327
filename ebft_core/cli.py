"""The commands that need no server: `validate`, `schema`, `preview`, `stage`, `evaluate`, `merge` and so on.

`flows/cli.py` adds `run`, `up` and the like and installs everything as `ebft`; here,
`python -m ebft_core.cli` works without Prefect and MLflow. torch is imported by the commands that compute.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ebft_core.config import load_config
from ebft_core.config.loading import config_advice, dump_yaml
from ebft_core.errors import ExitCode, UserError, UserErrors

app = typer.Typer(
    name="ebft",
    help="Energy-Based Fine-Tuning of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change one value, for example `--set ebft.stride=4`. Repeatable."
    ),
]
ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run file (YAML).")]
OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="File to write; unset: standard output.")
]


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turns errors into exit codes: a `UserError` is shown and exits 78, anything unexpected exits 70."""
    try:
        yield
    except UserError as error:
        fail(error)
    except BrokenPipeError:  # `| head`: typer ends quietly
        raise
    except Exception:  # noqa: BLE001 (the outermost handler of a program: shown in full, with its own code)
        traceback.print_exc()
        raise SystemExit(ExitCode.INTERNAL) from None


def fail(error: UserError) -> NoReturn:
    """Show an error of the user's and exit with 78."""
    typer.echo(error.render(), err=True)
    raise SystemExit(ExitCode.BAD_INPUT)


@app.command()
def validate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Run files (YAML).")],
    overrides: SetOption = None,
) -> None:
    """Print the resolved configuration of each FILE, or every error with its key path and line."""
    with exit_codes():
        errors: list[UserError] = []
        for file in files:
            try:
                config = load_config(file, overrides or ())
            except UserErrors as error:
                errors += error.errors
                continue
            typer.echo(f"# {file}\n{dump_yaml(config)}", nl=False)
            for advice in config_advice(config):
                typer.echo(f"advice: {advice} ({file})", err=True)
        if errors:
            raise UserErrors(errors)


@app.command()
def schema(output: OutputOption = None) -> None:
    """Write the JSON Schema of run files, which gives editors completion and checks."""
    from ebft_core.config.schema_view import schema_text

    with exit_codes():
        _write(schema_text, output)


@app.command()
def reference(output: OutputOption = None) -> None:
    """Write the configuration reference (Markdown), generated from the schema."""
    from ebft_core.config.reference import reference_text

    with exit_codes():
        _write(reference_text, output)


@app.command()
def stage(
    name: Annotated[str, typer.Argument(help="prepare_base, tokenize, sft, train, merge or evaluate.")],
    run_dir: Annotated[Path, typer.Option("--run-dir", help="Folder of a planned run.")],
) -> None:
    """Run one stage of a planned run (exit code 0 done, 75 stopped, 78 bad input, 70 internal)."""
    with exit_codes():
        from ebft_core import stage_runner

        raise SystemExit(int(stage_runner.main(name, run_dir)))


@app.command()
def preview(
    config: ConfigArgument,
    rows: Annotated[int, typer.Option("--rows", "-n", min=1, help="How many rows to show.")] = 3,
    overrides: SetOption = None,
) -> None:
    """Show rows as the trainer sees them: ids, decoded text, supervised spans, anchors."""
    with exit_codes():
        run = load_config(config, overrides or ())
        from ebft_core.data.preview import preview as show

        show(run, rows=rows)


@app.command()
def bench(
    config: ConfigArgument,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Counted steps per setting.")] = 3,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    overrides: SetOption = None,
) -> None:
    """Time the run's model on this machine: tokens per second, share of the peak, memory, a suggestion."""
    with exit_codes():
        run = load_config(config, overrides or ())
        from ebft_core.bench.command import bench as measure

        measure(run, rounds=rounds, as_json=json_)


@app.command("serve-vllm")
def serve_vllm(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="The run file (YAML).")] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Folder of a planned run, instead of CONFIG.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="Folder of the weights; unset: the run's base model.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65535, help="Port on loopback; unset: a free one.")
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Run the vLLM server of CONFIG alone; it is restarted when it dies or hangs, and Ctrl-C ends it."""
    with exit_codes():
        from ebft_core import commands

        raise SystemExit(int(commands.serve_vllm(config, run_dir, model, port, overrides or ())))


@app.command()
def merge(
    base: Annotated[Path, typer.Option("--base", help="Folder of the base model.")],
    adapter: Annotated[Path, typer.Option("--adapter", help="Folder of the PEFT adapter.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to make; must not exist.")],
    check: Annotated[
        bool, typer.Option(help="Compare the logits of base + adapter with those of the result.")
    ] = True,
) -> None:
    """Merge a LoRA adapter into its base model, shard by shard."""
    with exit_codes():
        from ebft_core import commands

        commands.merge(base, adapter, output, check=check)


@app.command()
def evaluate(
    model: Annotated[Path, typer.Option("--model", help="Folder of the tuned model.")],
    baseline: Annotated[Path, typer.Option("--baseline", help="Folder of the model to compare with.")],
    config: Annotated[Path, typer.Option("--config", help="Run file: its data and its evaluation settings.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file to write.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    overrides: SetOption = None,
) -> None:
    """Compare two models on the same held-out rows, with paired bootstrap intervals."""
    with exit_codes():
        run = load_config(config, overrides or ())
        from ebft_core import commands

        commands.evaluate(model, baseline, run, output=output, as_json=json_)


archive = typer.Typer(no_args_is_help=True, help="A run in its archive.")
app.add_typer(archive, name="archive")
RunDirArgument = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a planned run.")]


@archive.command()
def push(run_dir: RunDirArgument) -> None:
    """Copy finished stages and the report into the archive, as far as they are not there yet."""
    with exit_codes():
        from ebft_core.storage import commands

        raise SystemExit(int(commands.push(run_dir)))


@archive.command()
def status(run_dir: RunDirArgument) -> None:
    """Show which stages are here and which the archive can replace."""
    with exit_codes():
        from ebft_core.storage import commands

        commands.status(run_dir)


LocationArgument = Annotated[str, typer.Argument(metavar="ARCHIVE", help="`s3://bucket/prefix` or a folder.")]


@archive.command("list")
def list_(location: LocationArgument) -> None:
    """Show the runs in ARCHIVE, the newest first, and which of their stages it holds."""
    with exit_codes():
        from ebft_core.storage import commands

        commands.list_runs(location)


@archive.command()
def fetch(
    location: LocationArgument,
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, as `ebft archive list` names it.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to fill.")],
    stages: Annotated[
        list[str] | None, typer.Option("--stage", help="Also this stage's output, like `merge`. Repeatable.")
    ] = None,
) -> None:
    """Bring a run's folder from ARCHIVE (report, configuration, journals), and outputs of its stages."""
    with exit_codes():
        from ebft_core.storage import commands

        commands.fetch(location, run, output, stages or ())


def _write(make: Callable[[], str], output: Path | None) -> None:
    text = make()
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"the file cannot be written: {error.strerror}", where=str(output)) from error


def main(arguments: list[str] | None = None) -> Any:
    """Entry point of `python -m ebft_core.cli`."""
    return app(args=sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    main()
