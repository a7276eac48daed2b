"""Where the prompt comes from, and that it is text. Checked before anything heavy is loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dspark.cli.failures import say
from dspark.cli.options import RunOptions
from dspark.errors import InputError

EMPTY = "the prompt is empty: give some text, for example dspark run RECIPE 'Why is the sky blue?'"
MISSING = "there is no prompt: give one behind the recipe, pipe one in, or name a --file or --messages"


def read_prompt(options: RunOptions) -> str | list[Any]:
    """The prompt as text or messages. Raises InputError.

    Of what comes from a file or a pipe the last line break is dropped, unless `--raw` takes the text as it stands.
    """
    given = [
        name
        for name, value in (("a prompt", options.prompt), ("--file", options.file), ("--messages", options.messages))
        if value is not None
    ]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} were given; one of them is the prompt, drop the other")
    if options.messages is not None:
        return _messages(options.messages)
    if options.prompt is not None and options.prompt != "-":
        text = _argument(options.prompt)
    else:
        text = read_file(options.file) if options.file is not None else read_standard_input(options.prompt == "-")
        text = text if options.raw else text.removesuffix("\n").removesuffix("\r")
    if not (text if options.raw else text.strip()):
        raise InputError(EMPTY)
    return text


def parse_template(text: str | None) -> dict[str, Any]:
    """The object of `--chat-template-kwargs`. Raises InputError."""
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"--chat-template-kwargs: not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise InputError("--chat-template-kwargs: expected a JSON object, such as '{\"enable_thinking\": false}'")
    return found


def _argument(text: str) -> str:
    # Bytes that are not UTF-8 arrive in arguments as lone surrogates.
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise InputError("the prompt is not UTF-8; convert it first, for example with iconv")
    return text


def read_file(path: str) -> str:
    """The text of a file. Raises InputError where it cannot be read or is not UTF-8."""
    try:
        return _decode(Path(path).read_bytes(), path)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def read_standard_input(asked: bool) -> str:
    """The text of standard input. A terminal is read only where the user `asked` for it. Raises InputError."""
    if sys.stdin is None:
        raise InputError(MISSING)
    if sys.stdin.isatty():
        if not asked:
            raise InputError(MISSING)
        say("the prompt, please; Ctrl-D on a line of its own ends it")
    return _decode(sys.stdin.buffer.read(), "standard input")


def _decode(raw: bytes, name: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{name}, line {line}: not UTF-8 (byte 0x{raw[error.start]:02x}); convert it first, for example with iconv"
        ) from None


def _messages(path: str) -> list[Any]:
    """A list of messages, or an object that holds one under "messages" as requests to servers do."""
    text = read_standard_input(True) if path == "-" else read_file(path)
    name = "standard input" if path == "-" else path
    try:
        found = json.loads(text)
    except RecursionError:
        raise InputError(f"{name}: nested too deeply to be a list of messages") from None
    except ValueError as error:
        raise InputError(f"{name}: not valid JSON ({error})") from None
    messages = found.get("messages") if isinstance(found, dict) else found
    if not isinstance(messages, list) or not messages:
        raise InputError(f'{name}: expected a list of messages, such as [{{"role": "user", "content": "Hello"}}]')
    return messages
