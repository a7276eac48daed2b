"""The commands and their help texts; what they do is in a module each, imported when it is called for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Annotated, Any

import typer

from dspark import __version__
from dspark.cli import failures
from dspark.cli.bench_options import BenchOptions
from dspark.cli.calibrate_options import CalibrateOptions
from dspark.cli.options import RunOptions, record_command

RECIPE = "A shipped recipe's name, a file, or hf://user/repo/file.toml."

app = typer.Typer(
    name="dspark",
    help="Lossless speculative decoding on MLX: a drafter guesses, the target checks, the text stays the target's own.",
    epilog="First steps: dspark doctor; then dspark run smollm2-135m 'What is the capital of France?'",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def run_command(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0, 1 failure, 2 the user's mistake, 130 interrupted."""
    # Read when these libraries are imported: without it they advise on standard error.
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(name, "error")
    try:
        command: Any = typer.main.get_command(app)
        code = command.main(args=None if argv is None else list(argv), prog_name="dspark", standalone_mode=False)
        return failures.flush(code if isinstance(code, int) else 0)
    except BaseException as error:
        return failures.report(error)


def interruptible(call: Callable[..., int]) -> Callable[..., int]:
    """`call`, whose KeyboardInterrupt reaches `failures.report`."""

    @wraps(call)
    def guarded(*args: Any, **kwargs: Any) -> int:
        try:
            return call(*args, **kwargs)
        except KeyboardInterrupt:
            raise failures.Stopped from None

    return guarded


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dspark {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _run(options: RunOptions) -> int:
    """Answer a prompt. The text goes to standard output, everything else to standard error.

    With --batch, each line of a .txt file is a prompt; any other file, or a pipe, holds JSON lines: a string, or an object
    with prompt or messages and, as wanted, id, max_tokens, seed, stop, temperature, top_p, top_k and min_p. A line of JSON
    comes out for each answer, in the order of the prompts, as soon as it and those before it are done.

    Examples:

      dspark run smollm2-135m "What is the capital of France?"

      dspark run lookup --target mlx-community/Qwen3-0.6B-4bit --file notes.txt --temperature 0.7

      dspark run --target mlx-community/Qwen3-8B-4bit "Why is the sky blue?"

      git diff | dspark run smollm2-135m --system "Write a commit message." --quiet

      dspark run smollm2-135m --file prompts.jsonl --batch 4 > answers.jsonl
    """
    from dspark.cli.run import run

    return run(options)


app.command("run")(interruptible(record_command(RunOptions, _run)))


def _calibrate(options: CalibrateOptions) -> int:
    """Measure what a recipe costs on this machine, keep it, and draw it: verify by width, drafter by cap, the cap that follows.

    A run does so by itself the first time. Do it again, with nothing else running, where a run noted a disturbed machine.

    Examples:

      dspark calibrate smollm2-135m

      dspark calibrate smollm2-135m --show

      dspark calibrate smollm2-135m --batch 4 --plot curves.svg
    """
    from dspark.cli.calibrate import calibrate

    return calibrate(options)


app.command("calibrate")(interruptible(record_command(CalibrateOptions, _calibrate)))


def _bench(options: BenchOptions) -> int:
    """Measure a recipe against decoding alone and against other programs, in turn, and compare what they say.

    Prints medians, spreads and, where the runs carry one, speed-ups with their intervals. A peer runs in a process of its own
    on the same weights, in the same number format and with the same BLAS; with -stock behind its name, as it comes.

    Examples:

      dspark bench smollm2-135m

      dspark bench smollm2-135m --prompts copy --repeats 3 --max-tokens 64 --json copy.json

      dspark bench mine.toml --against mlx-lm,mlx-dspark --peer-python mlx-dspark=~/peer/bin/python
    """
    from dspark.cli.bench import bench

    return bench(options)


app.command("bench")(interruptible(record_command(BenchOptions, _bench)))


@app.command("train")
@interruptible
def _train(
    recipe: Annotated[str, typer.Argument(help="A training recipe, a .toml file.", metavar="RECIPE.toml")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run was stopped.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Load the target, say what the run would take, and stop.")
    ] = False,
    pack: Annotated[
        int | None,
        typer.Option(help="Only write a small copy of the finished drafter.", metavar="BITS", show_default=False),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Stop training so long after the start, data written to its end; --resume goes on.",
            metavar="S",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Make a drafter for a target from the target alone: it writes the conversations, and its hidden states teach.

    The drafter, a run recipe and the log go to the recipe's [output] folder. Ctrl-C saves; --resume ends in the same weights
    as a run that was never stopped.

    Examples:

      dspark train mine.toml --dry-run

      dspark train mine.toml

      dspark train mine.toml --resume --seconds 1500

      dspark train mine.toml --pack 4
    """
    from dspark.cli.train import train

    return train(recipe, resume, dry_run, pack, seconds)


@app.command("explain")
@interruptible
def _explain(
    recipe: Annotated[str, typer.Argument(help=RECIPE)],
    target: Annotated[str | None, typer.Option(help="Another target than the recipe's.", metavar="SOURCE")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key, as in draft.min_ngram=5.", metavar="KEY=VALUE")
    ] = None,
    proof: Annotated[
        bool, typer.Option("--proof", help="Load the target too, plan the rollback for its layers and prove it.")
    ] = False,
) -> int:
    """Show what a recipe does and what it promises. Needs no weights unless --proof is given."""
    from dspark.cli.explain import explain

    return explain(recipe, target, tuple(settings or ()), proof)


@app.command("recipes")
@interruptible
def _recipes() -> int:
    """List the shipped recipes, what each needs, and whether that is on this disk."""
    from dspark.cli.recipes import recipes

    return recipes()


@app.command("inspect")
@interruptible
def _inspect(
    drafter: Annotated[str, typer.Argument(help="A hub repository, a folder, or one GGUF file of either.")],
    target: Annotated[
        str | None, typer.Option(help="Hold it against this target's config.", metavar="SOURCE", show_default=False)
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="A branch, tag or commit of the repository.", metavar="NAME", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.", show_default=False)] = False,
) -> int:
    """Say what a drafter is, from its headers alone, and why it would be refused. Exits with 1 when it would."""
    from dspark.cli.inspect import inspect

    return inspect(drafter, target, revision, as_json)


@app.command("doctor")
@interruptible
def _doctor() -> int:
    """Check this machine, one line a check with its remedy. Exits with 0 when a run will work."""
    from dspark.cli.doctor import doctor

    return doctor()
