"""What is wrong with a recipe, said in one line a fault: `key.path: problem; allowed ...; did you mean 'x'?`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cattrs.errors import BaseValidationError, ForbiddenExtraKeysError

from dspark.errors import UserError

Keys = tuple[str | int, ...]
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class Fault(ValueError):
    """A value that does not fit its place. `keys` lead from where it is raised to the culprit."""

    def __init__(self, text: str, *keys: str | int):
        super().__init__(text)
        self.keys: Keys = keys


class UnknownKeys(Fault):
    """Keys that a table does not have; `texts` says for each what would do."""

    def __init__(self, texts: Mapping[str, str]):
        super().__init__("unknown keys")
        self.texts = dict(texts)


def show(value: Any) -> str:
    """A value as a recipe's author knows it: `true`, not `True`; long ones are cut."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return "an array"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"


def key_path(keys: Keys) -> str:
    """`draft.branches[1].kind`; a key that needs quotes gets them."""
    text = ""
    for key in keys:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            text += ("." if text else "") + (key if BARE_KEY.fullmatch(key) else repr(key))
    return text


def faults_of(error: BaseException, at: Keys = ()) -> Iterator[tuple[Keys, str]]:
    """Every fault inside a cattrs error, with its key path. Raises what is no fault of the input, such as a stage's bug."""
    if isinstance(error, BaseValidationError):
        for inner in error.exceptions:
            yield from faults_of(inner, at + noted_keys(inner))
    elif isinstance(error, UnknownKeys):
        yield from (((*at, key), text) for key, text in error.texts.items())
    elif isinstance(error, Fault):
        yield at + error.keys, str(error)
    elif isinstance(error, UserError | ValueError | TypeError):
        yield at, reason(error)
    else:
        raise error


def noted_keys(error: BaseException) -> Keys:
    """The key or index that cattrs noted on an error, or nothing."""
    for note in getattr(error, "__notes__", ()):
        key = getattr(note, "name", getattr(note, "index", None))
        if key is not None:
            return (key,)
    return ()


def reason(error: BaseException) -> str:
    """An exception's own words: attrs' validators put them first and objects behind them."""
    return str(error.args[0]) if error.args else type(error).__name__


def first_word(text: str) -> str:
    """The first word of a message without quotes: validators begin with the field's name."""
    return text.split(maxsplit=1)[0].strip("'\"`:;,") if text.strip() else ""


def without_name(text: str, name: str, value: Any) -> str:
    """`cap is -1; ...` as `got -1; ...`, for the key path in front says the name already."""
    said = re.match(rf"{re.escape(name)} is {re.escape(repr(value))}(\.0)?(?![\w.])", text)
    return f"got {show(value)}{text[said.end() :]}" if said else text.removeprefix(f"{name} is ")


def extra_keys(error: BaseException) -> set[str]:
    """The keys that cattrs refused, if that is what the error is."""
    return error.extra_fields if isinstance(error, ForbiddenExtraKeysError) else set()
