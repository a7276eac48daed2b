"""Many prompts from one file: a line each of a .txt file, a JSON value a line of any other. Read before anything is loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from dspark.cli.inputs import read_file, read_standard_input
from dspark.cli.options import RunOptions
from dspark.errors import InputError, did_you_mean

STANDARD_INPUT = "standard input"
EXAMPLE = '{"prompt": "Why is the sky blue?"}'


@attrs.frozen
class Line:
    """One prompt of the file and what its line asks for; a None leaves it to the command line.

    number: counts from 1, lines without a prompt included; prompt: text or messages; tag: the line's `id`, any string or
    number; sampling: options of `Sampling` by name.
    """

    number: int
    prompt: str | list[Any]
    tag: str | int | float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    sampling: Mapping[str, float | int] = attrs.field(factory=dict)


def read_lines(options: RunOptions) -> tuple[str, list[Line]]:
    """(the file's name, its prompts). Raises InputError, one sentence with file and line, for what is not usable.

    Lines of white space are passed over. Standard input holds JSON lines.
    """
    for name, value in (("a prompt", options.prompt), ("--messages", options.messages)):
        if value is not None and value != "-":
            raise InputError(f"--batch and {name} were given; with --batch the prompts come from --file or a pipe")
    if options.live == "table":
        raise InputError("--live table shows one answer; with --batch take line or off")
    from_pipe = options.file in (None, "-")
    name = STANDARD_INPUT if from_pipe else str(options.file)
    text = read_standard_input(True) if from_pipe else read_file(name)
    read = _text(options.raw) if Path(name).suffix.lower() == ".txt" else _json
    # Not splitlines: U+2028 and its like end no line of JSON.
    lines = parse(name, text.split("\n"), read)
    if not lines:
        raise InputError(f"{name}: holds no prompt; give one a line, for example {EXAMPLE}")
    return name, lines


def parse(name: str, texts: list[str], read: Callable[[int, str], Line]) -> list[Line]:
    """The lines that `read` makes of texts. Raises InputError for the first faulty one, and counts the others."""
    lines: list[Line] = []
    faults: list[str] = []
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            lines.append(read(number, text))
        except InputError as error:
            faults.append(f"{name}, line {number}: {error}")
    if faults:
        raise InputError(first_of(faults))
    return lines


def first_of(faults: list[str]) -> str:
    """The first fault, and how many lines have one besides."""
    more = len(faults) - 1
    return faults[0] + (f" (and {more} more faulty {'line' if more == 1 else 'lines'})" if more else "")


def _text(raw: bool) -> Callable[[int, str], Line]:
    return lambda number, text: Line(number, text if raw else text.removesuffix("\r"))


def _json(number: int, text: str) -> Line:
    try:
        found = json.loads(text)
    except RecursionError:
        raise InputError("nested too deeply to be a prompt") from None
    except ValueError as error:
        raise InputError(f"not valid JSON ({error}); plain text, a prompt a line, is read from .txt only") from None
    if isinstance(found, str):
        found = {"prompt": found}
    if not isinstance(found, dict):
        raise InputError(f"expected an object such as {EXAMPLE}, or a string")
    return _line(number, found)


def _line(number: int, found: dict[str, Any]) -> Line:
    for key in found:
        if key not in KEYS:
            raise InputError(f"unknown key {key!r}; allowed: {', '.join(KEYS)}{did_you_mean(key, KEYS)}")
    given = {key: KEYS[key](value) for key, value in found.items() if value is not None}
    prompts = [key for key in ("prompt", "messages") if key in given]
    if len(prompts) != 1:
        raise InputError(f"{'both prompt and' if prompts else 'neither prompt nor'} messages; give one of them")
    return Line(
        number,
        given[prompts[0]],
        given.get("id"),
        given.get("max_tokens"),
        given.get("seed"),
        given.get("stop"),
        {key: given[key] for key in SAMPLED if key in given},
    )


def _prompt(value: Any) -> str:
    if not isinstance(value, str):
        raise InputError(f"prompt is {value!r:.60}; it must be a string")
    if not value.strip():
        raise InputError("prompt is empty; give some text")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise InputError("prompt holds half of a surrogate pair, which is no character; write it as UTF-8")
    return value


def _messages(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise InputError('messages: expected a list such as [{"role": "user", "content": "Hello"}]')
    return value


def _tag(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InputError(f"id is {value!r:.60}; it must be a string or a number")
    return value


def _max_tokens(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"max_tokens is {value!r:.60}; it must be a whole number, 0 or more")
    return value


def _seed(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise InputError(f"seed is {value!r:.60}; it must be a whole number from 0 to 2^64 - 1")
    return value


def _number(name: str) -> Callable[[Any], float]:
    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InputError(f"{name} is {value!r:.60}; it must be a number")
        return value

    return check


def _stop(value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) and stop for stop in stops):
        raise InputError(f"stop is {value!r:.60}; it must be a string or a list of strings, none of them empty")
    return tuple(stops)


SAMPLED = ("temperature", "top_p", "top_k", "min_p")
KEYS: dict[str, Callable[[Any], Any]] = {
    "prompt": _prompt,
    "messages": _messages,
    "id": _tag,
    "max_tokens": _max_tokens,
    "seed": _seed,
    "stop": _stop,
    **{name: _number(name) for name in SAMPLED},
}
