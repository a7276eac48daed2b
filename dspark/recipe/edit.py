"""Changes to a recipe's data before it is checked: `--set` and other options, and what calibration found."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dspark.recipe.faults import Fault, Keys, key_path, show

STEP = re.compile(r"\.?([A-Za-z0-9_-]+)|\[(\d+)\]")
ABSENT = object()
Data = dict[str, Any]


class Override(NamedTuple):
    """A value for a key. `label` is what the user wrote to give it: `--set draft.min_ngram`, `--cap`."""

    keys: Keys
    value: Any
    label: str


class Edit(NamedTuple):
    """One change that was made: `old` is ABSENT where the file did not have the key; `stood`: how many leading keys it had."""

    keys: Keys
    old: Any
    new: Any
    label: str
    stood: int

    def covers(self, keys: Keys) -> bool:
        """Whether what is at `keys` is there because of this change."""
        shared = min(len(keys), len(self.keys))
        return len(keys) > self.stood - (self.old is not ABSENT) and keys[:shared] == self.keys[:shared]


def parse_set(text: str) -> Override:
    """`draft.min_ngram=5` as an override. The value is TOML; what is no TOML is a string. Raises Fault."""
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not path:
        raise Fault(f"--set {text}: expected KEY=VALUE, as in --set draft.min_ngram=5")
    return Override(parse_keys(path), parse_value(value.strip()), f"--set {path}")


def parse_keys(path: str) -> Keys:
    """`draft.branches[1].kind` as keys. Raises Fault."""
    keys: list[str | int] = []
    at = 0
    while at < len(path):
        step = STEP.match(path, at)
        if step is None or (at == 0) != (step[0] == step[1]):
            raise Fault(f"--set {path}: expected keys with dots between them, as in draft.branches[1].kind")
        keys.append(step[1] if step[2] is None else int(step[2]))
        at = step.end()
    return tuple(keys)


def parse_value(text: str) -> Any:
    """A TOML value, or the text itself where it is none: `5`, `true`, `[1, 2]`, `"5"`, `user/repo`."""
    try:
        found = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return found["value"] if found.keys() == {"value"} else text


def override(data: Mapping[str, Any], settings: Iterable[str | Override]) -> tuple[Data, list[Edit], list[str]]:
    """A copy of `data` with the settings in it, the edits made, and a line for each setting that has no place.

    A new `kind` replaces its table, since the old kind's keys mean nothing to it; so kinds are set first.
    """
    made, edits, faults, parsed = copy.deepcopy(dict(data)), [], [], []
    for setting in settings:
        try:
            parsed.append(parse_set(setting) if isinstance(setting, str) else setting)
        except Fault as fault:
            faults.append(str(fault))
    for keys, value, label in sorted(parsed, key=lambda o: o.keys[-1] != "kind"):
        try:
            stood = _standing(made, keys)
            edits.append(Edit(keys, _assign(made, keys, value), value, label, stood))
        except Fault as fault:
            faults.append(f"{label}: {fault}")
    return made, edits, faults


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any], source: str) -> tuple[Data, list[Edit]]:
    """A copy of `base` with the overlay's values in it: tables key by key, and as a whole where their kind differs."""
    made, edits = copy.deepcopy(dict(base)), []
    _merge(made, overlay, (), source, edits)
    return made, edits


def _merge(base: Data, overlay: Mapping[str, Any], at: Keys, source: str, edits: list[Edit]) -> None:
    for key, new in overlay.items():
        old = base.get(key, ABSENT)
        if isinstance(old, dict) and isinstance(new, Mapping) and old.get("kind") == new.get("kind", old.get("kind")):
            _merge(old, new, (*at, key), source, edits)
        elif old != new:
            base[key] = copy.deepcopy(new)
            edits.append(Edit((*at, key), old, new, source, len(at) + (old is not ABSENT)))


def _standing(place: Any, keys: Keys) -> int:
    """How many of the keys lead somewhere already."""
    for count, key in enumerate(keys):
        try:
            place = place[key]
        except (KeyError, IndexError, TypeError):
            return count
    return len(keys)


def _assign(data: Data, keys: Keys, value: Any) -> Any:
    """Put a value in its place and return what stood there. Tables on the way are made."""
    place: Any = data
    for i, key in enumerate(keys[:-1]):
        follower = keys[i + 1]
        if isinstance(place, dict) and key not in place and isinstance(follower, str):
            place[key] = {}
        place = _step(place, key, keys[:i])
    last, old = keys[-1], ABSENT
    if isinstance(last, int) or not isinstance(place, dict):
        old = _step(place, last, keys[:-1])
    else:
        old = place.get(last, ABSENT)
        if last == "kind" and old not in (ABSENT, value):
            place.clear()
    place[last] = copy.deepcopy(value)
    return old


def _step(place: Any, key: str | int, at: Keys) -> Any:
    name = key_path(at) or "the recipe"
    if isinstance(key, int):
        if not isinstance(place, list):
            raise Fault(f"{name} is {show(place)}, not an array")
        if key >= len(place):
            raise Fault(f"{name} has {len(place)} entries, counted from 0; there is no [{key}]")
        return place[key]
    if not isinstance(place, dict):
        raise Fault(f"{name} is {show(place)}, not a table")
    if key not in place:
        raise Fault(f"{name} has no {key}")
    return place[key]
