"""What calibration writes down: whom it measured, on what, when, and which keys of the recipe follow from it."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple

import attrs
import tomli_w

from dspark.caps.curve import CostCurve
from dspark.errors import InputError
from dspark.platform import Machine

SCHEMA = 1
# How often figures of a disturbed machine are measured again, once a run.
RETRIES = 3
HEADER = """\
# Written by dspark: what this recipe costs on this machine. Safe to read, to share and to delete.
# [measured] holds the figures, in milliseconds; what stands before it follows from them and replaces the recipe's.
"""
NUMBERS = re.compile(r"\[\n\s+([^\[\]{}\"]*?),?\n\s*\]")


class Identity(NamedTuple):
    """What the figures belong to, by content and never by a file's name: architecture and weight shapes of target and
    drafter, how weights are packed, which kernels run, what is computed in."""

    target: str
    drafter: str
    quantisation: str
    kernels: str
    dtype: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(tuple(self)).encode()).hexdigest()[:12]


def _only_start(instance: Any, attribute: Any, changes: Mapping[str, Any]) -> None:
    table = changes.get("cap", {})
    for unknown in [k for k in changes if k != "cap"] or (
        [f"cap = {table!r}"] if not isinstance(table, Mapping) else []
    ):
        raise InputError(f"{unknown} is nothing that calibration changes; it changes cap.start")
    for key, value in table.items():
        if key != "start" or type(value) is not int or value < 0:
            raise InputError(f"cap.{key} is {value!r}; calibration changes cap.start, a whole number of at least 0")


@attrs.frozen
class Calibration:
    """One recipe's measurement. machine: its `facts`; date: `2026-08-30`; seconds: how long it took; notes: what should be
    known of its quality; changes: keys of the recipe with the values that follow, as plain data (`cap.start` or nothing);
    asked: a digest of how the recipe names target and drafter; tries: how often it was measured again since, because the
    machine was disturbed.
    """

    machine: Mapping[str, Any]
    identity: Identity
    costs: CostCurve
    date: str
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    changes: Mapping[str, Any] = attrs.field(factory=dict, validator=_only_start)
    asked: str = ""
    tries: int = 0

    @property
    def start(self) -> int | None:
        """The cap to begin with on this machine; None where none follows."""
        return self.changes.get("cap", {}).get("start")

    def source(self) -> str:
        """Where figures come from, for `explain`: chip, MLX version, date and the first knees."""
        knees = "; ".join(str(k) for k in self.costs.knees()[:2])
        return ", ".join([self.machine["chip"], f"mlx {self.machine['mlx']}", self.date] + ([knees] if knees else []))


def facts(machine: Machine) -> dict[str, Any]:
    """A machine as files describe it. Memory in whole GB: what firmware and kernel keep for themselves varies."""
    known = machine._asdict()
    return {
        "memory_gb" if k == "memory_bytes" else k: round(v / 1e9) if k == "memory_bytes" else v
        for k, v in known.items()
    }


def due(calibration: Calibration) -> bool:
    """Whether a stored calibration should be measured again: the machine was disturbed, and that was not tried often."""
    return calibration.costs.disturbed and calibration.tries < RETRIES


class Stale(Exception):
    """The text is a calibration, but not one that holds here; says why."""


def write(calibration: Calibration) -> str:
    """A calibration as TOML that people can read."""
    measured = {
        "date": calibration.date,
        "seconds": round(calibration.seconds, 1),
        "spread": calibration.costs.spread,
        "notes": list(calibration.notes),
        "asked": calibration.asked,
        "tries": calibration.tries,
        "machine": dict(calibration.machine),
        "recipe": calibration.identity._asdict(),
        "costs": calibration.costs.to_dict(),
    }
    text = tomli_w.dumps({"schema": SCHEMA, **calibration.changes, "measured": measured})
    return HEADER + NUMBERS.sub(lambda m: f"[{' '.join(m[1].split())}]", text)


def read(text: str, machine: Machine, identity: Identity) -> Calibration:
    """The calibration in `text`. Raises Stale where it is of another schema, machine, MLX or recipe, and InputError or
    ValueError where it is none."""
    data = tomllib.loads(text)
    schema = data.pop("schema", None)
    if type(schema) is not int:
        raise InputError("schema is missing")
    if schema != SCHEMA:
        raise Stale(f"its schema is {schema} and this dspark writes {SCHEMA}")
    measured = _table(data.pop("measured", None), "measured")
    here = facts(machine)
    _compare(_table(measured.get("machine"), "measured.machine"), here)
    _compare(_table(measured.get("recipe"), "measured.recipe"), identity._asdict())
    return _made(measured, here, identity, data)


def read_asked(text: str, machine: Machine, asked: str) -> Calibration:
    """The calibration in `text`, taken for that of a recipe that names target and drafter as `asked` says; what they really
    are is not looked at. Raises as `read` does."""
    measured = _table(tomllib.loads(text).get("measured"), "measured")
    if measured.get("asked") != asked:
        raise Stale("it is for another target or drafter")
    said = _table(measured.get("recipe"), "measured.recipe")
    return read(text, machine, Identity(**{key: str(said.get(key)) for key in Identity._fields}))


def _made(measured: Mapping[str, Any], here: dict[str, Any], identity: Identity, changes: Any) -> Calibration:
    date, seconds, notes = measured.get("date"), measured.get("seconds", 0.0), measured.get("notes", [])
    tries = measured.get("tries", 0)
    if type(tries) is not int or not (
        isinstance(date, str) and isinstance(seconds, int | float) and isinstance(notes, list)
    ):
        raise InputError("measured.date, .seconds, .notes or .tries is missing or of the wrong type")
    costs = CostCurve.from_dict(_table(measured.get("costs"), "measured.costs"))
    notes = tuple(map(str, notes))
    asked = str(measured.get("asked", ""))
    return Calibration(here, identity, costs, date, float(seconds), notes, changes, asked, tries)


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{where} is missing or no table")
    return value


def _compare(said: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    for key, value in here.items():
        if said.get(key) != value:
            raise Stale(f"it was measured with {key} {said.get(key, 'unknown')}, and this is {value}")
