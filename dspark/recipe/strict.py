"""A strict cattrs converter for attrs classes: all faults of a table are found, where a constructor stops at the first."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from cattrs import Converter
from cattrs.errors import ClassValidationError
from cattrs.gen import make_dict_structure_fn, override

from dspark.errors import UserError, did_you_mean
from dspark.recipe.faults import Fault, UnknownKeys, extra_keys, first_word, noted_keys, reason, without_name
from dspark.recipe.values import Hook, expects, need, register_values

Unknown = Callable[[str, type, list[str]], str]


def unknown_key(key: str, cls: type, keys: list[str]) -> str:
    """What is said of a key that a table does not have."""
    return f"unknown key; allowed: {', '.join(keys) or 'none'}{did_you_mean(key, keys)}"


def make_converter(unknown: Unknown = unknown_key) -> Converter:
    """A strict converter for attrs classes, scalars, arrays and tables; `unknown` words what is said of an unknown key."""
    converter = Converter(omit_if_default=True, forbid_extra_keys=True, detailed_validation=True)
    register_values(converter)
    converter.register_structure_hook_factory(attrs.has, lambda t: _table(t, converter, unknown))
    return converter


def fields_of(cls: type) -> tuple[attrs.Attribute, ...]:
    """The fields that a recipe may set: those `init` takes, less private ones and those with metadata `{"key": False}`."""
    return tuple(a for a in attrs.fields(cls) if a.init and not a.name.startswith("_") and a.metadata.get("key", True))


def _table(cls: Any, converter: Converter, unknown: Unknown) -> Hook:
    """A hook for an attrs class that finds all faults of its table, where a constructor stops at the first.

    Faulty keys are taken out and the rest is tried again, until it fits or nothing can be taken out any more.
    """
    keys = [a.name for a in fields_of(cls)]
    hidden: dict[str, Any] = {a.name: override(omit=True) for a in attrs.fields(cls) if a.name not in keys}
    build = make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True, **hidden)

    def structure(value: Any, _: Any) -> Any:
        need(value, Mapping, "a table")
        left, errors, faulty = dict(value), [], set()
        while True:
            try:
                made = build(left, cls)
            except ClassValidationError as group:
                found = [_explained(error, left, cls, unknown) for error in group.exceptions]
            else:
                break
            # What mentions a faulty key may be a consequence of that key's absence, and no fault of the file.
            errors += [error for error, names, mentions in found if not faulty & mentions]
            faulty.update(*(names for _, names, _ in found))
            culprits = faulty & left.keys()
            if not culprits:
                break
            for key in culprits:
                del left[key]
        if errors:
            raise ClassValidationError("", errors, cls)  # pyright: ignore[reportCallIssue]
        return made

    return structure


def _explained(
    error: Any, table: Mapping[str, Any], cls: Any, unknown: Unknown
) -> tuple[Exception, set[Any], set[Any]]:
    """An error of a table in our words, the keys at fault, and the keys that it speaks of."""
    keys = [a.name for a in fields_of(cls)]
    if extra := extra_keys(error):
        return UnknownKeys({key: unknown(key, cls, keys) for key in sorted(extra)}), extra, set()
    if noted := noted_keys(error):
        if not isinstance(error, KeyError):
            return error, set(noted), set()
        wanted = next((n.type for n in error.__notes__ if hasattr(n, "type")), Any)
        return Fault(f"required key is missing; expected {expects(wanted)}", *noted), set(noted), set(noted)
    if not isinstance(error, UserError | ValueError | TypeError):
        raise error
    text, word = reason(error), first_word(reason(error))
    mentions, mine = set(re.findall(r"\w+", text)), (word,) if word in keys else ()
    if word in table:
        text = without_name(text, word, table[word])
    return Fault(text, *mine), set(mine), mentions
