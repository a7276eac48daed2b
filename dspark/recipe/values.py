"""Values taken at their word: 2.7 is no integer, true is none either, 7 is no string, a string is no array.

cattrs alone would convert the first three and iterate the fourth.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from cattrs import Converter
from cattrs.errors import IterableValidationError, IterableValidationNote

from dspark.errors import did_you_mean
from dspark.recipe.faults import Fault, show

Hook = Callable[[Any, Any], Any]
INTEGERS = range(-(2**63), 2**64)
SEQUENCES = (tuple, list, Sequence)
MAPPINGS = (dict, Mapping)
WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    Path: "a path in quotes",
}


def register_values(converter: Converter) -> None:
    """Make a converter strict about scalars, choices, arrays, tables of values and unions of these."""
    for scalar, hook in ((int, _integer), (float, _number), (str, _string), (bool, _boolean), (Path, _path)):
        converter.register_structure_hook(scalar, hook)
    converter.register_structure_hook_func(lambda t: get_origin(t) is Literal, _choice)
    converter.register_structure_hook_factory(_is_sequence, lambda t: _sequence(t, converter))
    converter.register_structure_hook_factory(is_mapping, lambda t: _mapping(t, converter))
    converter.register_structure_hook_factory(_is_union, lambda t: _union(t, converter))


def need(value: Any, cls: type, expected: str) -> None:
    """Raise a Fault unless `value` is of a class."""
    if not isinstance(value, cls):
        raise Fault(f"expected {expected}, got {show(value)}")


def expects(kind: Any) -> str:
    """A type in a recipe author's words."""
    if kind in WORDS:
        return WORDS[kind]
    if get_origin(kind) is Literal:
        return " or ".join(map(show, get_args(kind)))
    if _is_union(kind):
        return " or ".join(expects(k) for k in get_args(kind) if k is not NoneType)
    return "an array" if _is_sequence(kind) else "a table"


def _integer(value: Any, _: Any) -> int:
    if type(value) is not int:
        raise Fault(f"expected an integer, got {show(value)}")
    if value not in INTEGERS:
        raise Fault(f"{show(value)} does not fit into 64 bits")
    return value


def _number(value: Any, _: Any) -> float:
    if type(value) not in (int, float):
        raise Fault(f"expected a number, got {show(value)}")
    if isinstance(value, int):
        return float(_integer(value, int))
    if math.isnan(value):
        raise Fault("expected a number, got nan")
    return value


def _string(value: Any, _: Any) -> str:
    if not isinstance(value, str):
        hint = "" if isinstance(value, Mapping | list) else "; write it in quotes"
        raise Fault(f"expected a string, got {show(value)}{hint}")
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise Fault(f"expected text in UTF-8, got {value!r}")
    return value


def _boolean(value: Any, _: Any) -> bool:
    need(value, bool, "true or false")
    return value


def _path(value: Any, _: Any) -> Path:
    return Path(_string(value, str))


def _choice(value: Any, kind: Any) -> Any:
    allowed = get_args(kind)
    if not any(type(value) is type(a) and value == a for a in allowed):
        near = did_you_mean(value, allowed) if isinstance(value, str) else ""
        raise Fault(f"{show(value)} is not a choice; allowed: {', '.join(map(str, allowed))}{near}")
    return value


def is_mapping(kind: Any) -> bool:
    """Whether a type is that of a table of values with free keys."""
    return (get_origin(kind) or kind) in MAPPINGS


def _is_sequence(kind: Any) -> bool:
    return (get_origin(kind) or kind) in SEQUENCES


def _sequence(kind: Any, converter: Converter) -> Hook:
    make = list if (get_origin(kind) or kind) is list else tuple
    items = get_args(kind) or (Any, ...)
    fixed = get_origin(kind) is tuple and items[-1] is not ...

    def structure(value: Any, _: Any) -> Any:
        need(value, list, "an array")
        if fixed and len(value) != len(items):
            raise Fault(f"expected {len(items)} values, got {len(value)}")
        kinds = items if fixed else items[:1] * len(value)
        return make(_each(zip(range(len(value)), value, kinds, strict=True), converter).values())

    return structure


def _mapping(kind: Any, converter: Converter) -> Hook:
    key_kind, item = get_args(kind) or (str, Any)

    def structure(value: Any, _: Any) -> Any:
        need(value, Mapping, "a table")
        made = _each(((key, inner, item) for key, inner in value.items()), converter)
        return {_key(key, key_kind): inner for key, inner in made.items()}

    return structure


def _key(key: str, kind: Any) -> Any:
    """TOML's keys are text; where a field wants numbers they are digits."""
    if kind is int and not re.fullmatch(r"0|[1-9][0-9]{0,17}", key):
        raise Fault("expected a key of digits", key)
    return int(key) if kind is int else key


def _each(items: Iterable[tuple[Any, Any, Any]], converter: Converter) -> dict[Any, Any]:
    """Structure every (key, value, type); all that fail are raised together, each with its key."""
    made, errors = {}, []
    for key, value, kind in items:
        try:
            made[key] = converter.structure(value, kind)
        except Exception as error:
            error.__notes__ = [*getattr(error, "__notes__", ()), IterableValidationNote("", key, kind)]
            errors.append(error)
    if errors:
        raise IterableValidationError("", errors, dict)  # pyright: ignore[reportCallIssue]
    return made


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def _union(kind: Any, converter: Converter) -> Hook:
    members = [k for k in get_args(kind) if k is not NoneType]

    def structure(value: Any, _: Any) -> Any:
        if value is None and len(members) < len(get_args(kind)):
            return None
        for member in members:
            try:
                return converter.structure(value, member)
            except Fault:
                if len(members) == 1:
                    raise
        raise Fault(f"expected {expects(kind)}, got {show(value)}")

    return structure
