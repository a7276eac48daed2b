"""From an exception to one sentence on standard error and an exit code. No traceback unless DSPARK_DEBUG asks for it."""

from __future__ import annotations

import os
import sys

from dspark.errors import DsparkError, RecipeError
from dspark.telemetry.terminal import harmless

OK, FAILURE, MISTAKE, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141
DEBUG = "DSPARK_DEBUG"


class ReaderGone(Exception):
    """Whoever read standard output has gone. Not a BrokenPipeError, which typer would turn into a failure."""

    exit_code = BROKEN_PIPE


class Stopped(Exception):
    """A KeyboardInterrupt, under a name that typer does not swallow."""

    exit_code = INTERRUPTED


def say(text: str) -> None:
    """A line on standard error, harmless to a terminal; a closed one is no reason to fail."""
    try:
        sys.stderr.write(f"{harmless(text) if sys.stderr.isatty() else text}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


def flush(code: int) -> int:
    """Send out what standard output still holds, and the exit code that this leads to."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return broken_pipe()
    except OSError as error:
        mute_stdout()
        say(f"dspark: standard output: {error.strerror}")
        return FAILURE
    return code


def broken_pipe() -> int:
    """Whoever read standard output has gone: end without a word, as `head` expects."""
    mute_stdout()
    return BROKEN_PIPE


def mute_stdout() -> None:
    """Let the interpreter's own flush at exit go nowhere, so that it does not complain."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):
        pass


def report(error: BaseException) -> int:
    """Say what went wrong and return the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else OK if error.code is None else FAILURE
    if isinstance(error, BrokenPipeError | ReaderGone):
        return broken_pipe()
    if isinstance(error, KeyboardInterrupt | Stopped) or type(error).__name__ == "Abort":
        say("dspark: interrupted")
        return INTERRUPTED
    if os.environ.get(DEBUG):
        import traceback

        traceback.print_exception(error)
    for sentence in sentences(error):
        say(f"dspark: {sentence}")
    if isinstance(error, DsparkError):
        return error.exit_code
    return int(getattr(error, "exit_code", FAILURE))


def sentences(error: BaseException) -> list[str]:
    """What to say of an error; a recipe's faults are a line each."""
    if isinstance(error, RecipeError):
        # A fault of an option's value is not the file's.
        return [p if p.startswith("--") else f"{error.path}: {p}" for p in error.problems]
    if isinstance(error, DsparkError):
        return [str(error)]
    if hasattr(error, "format_message"):
        return [_usage(error)]
    first = (str(error).strip().splitlines() or ["no reason given"])[0]
    hint = "" if os.environ.get(DEBUG) else f"; {DEBUG}=1 shows where"
    return [f"unexpected {type(error).__name__}: {first}{hint}"]


def _usage(error: BaseException) -> str:
    """A command line that could not be read, in one sentence."""
    text = error.format_message().rstrip(".")  # type: ignore[attr-defined]
    text = " ".join(text.split())
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", "dspark")
    return f"{text[:1].lower()}{text[1:]} (see {path} --help)"
