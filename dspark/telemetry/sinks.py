"""Telemetry sinks: callables that take a `RoundEvent`. They run between rounds, so they must be quick and never raise."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dspark.errors import InputError
from dspark.records import RoundEvent, RowCommit, Shadow, TokenLogprobs

Sink = Callable[[RoundEvent], None]


class Collect:
    """Keep every event in `events`. They hold host numbers and strings only, so a million of them is no trouble."""

    def __init__(self) -> None:
        self.events: list[RoundEvent] = []

    def __call__(self, event: RoundEvent) -> None:
        self.events.append(event)


class JsonLines:
    """Write a line of JSON a round, flushed at once, so that a reader can follow and a crash loses nothing.

    Opening raises InputError where the file cannot be written. A disk that fills up later does not end the answer: `problem`
    then holds a sentence, and no further line is written.
    """

    def __init__(self, path: str | Path):
        self.path, self.rounds, self.problem = str(path), 0, ""
        try:
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115  (closed by close())
        except OSError as error:
            raise InputError(f"events file {self.path}: cannot be written ({error.strerror})") from None

    def __call__(self, event: RoundEvent) -> None:
        if self.problem:
            return
        try:
            self._file.write(json.dumps(to_dict(event), ensure_ascii=False) + "\n")
            self._file.flush()
            self.rounds += 1
        except OSError as error:
            self._failed(error)

    def close(self) -> None:
        """Safe to call twice."""
        try:
            self._file.close()
        except OSError as error:
            self._failed(error)

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _failed(self, error: OSError) -> None:
        self.problem = self.problem or (
            f"events file {self.path}: {error.strerror}; {self.rounds} rounds were written, the rest is missing"
        )


def tee(*sinks: Sink) -> Sink:
    """One sink that hands every event to each of `sinks`, in their order."""

    def hand_on(event: RoundEvent) -> None:
        for sink in sinks:
            sink(event)

    return hand_on


def to_dict(event: RoundEvent) -> dict[str, Any]:
    """An event as plain data for JSON; empty log-probabilities and shadows that were not made are left out."""
    table = event._asdict()
    table["rows"] = [_row(row) for row in event.rows]
    table["judged"] = [shadow._asdict() for shadow in event.judged]
    for key in ("shadow", "judged"):
        if not table[key]:
            del table[key]
    return table


def from_dict(table: dict[str, Any]) -> RoundEvent:
    """The event that `to_dict` wrote. Raises KeyError or TypeError for anything else."""
    rows = tuple(_row_commit(row) for row in table["rows"])
    judged = tuple(Shadow(**shadow) for shadow in table.get("judged", ()))
    return RoundEvent(**{**table, "rows": rows, "context_tokens": tuple(table["context_tokens"]), "judged": judged})


def read_events(path: str | Path) -> Iterator[RoundEvent]:
    """The events of a file that `JsonLines` wrote. Raises InputError naming the line that is none."""
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield from_dict(json.loads(line))
                except (ValueError, KeyError, TypeError) as error:
                    raise InputError(f"events file {path}, line {number}: no event of a round ({error})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"events file {path}: cannot be read ({getattr(error, 'strerror', error)})") from None


def _row(row: RowCommit) -> dict[str, Any]:
    table = row._asdict()
    table["logprobs"] = [{"logprob": entry.logprob, "top": entry.top} for entry in row.logprobs]
    if not row.logprobs:
        del table["logprobs"]
    return table


def _row_commit(table: dict[str, Any]) -> RowCommit:
    logprobs = tuple(
        TokenLogprobs(entry["logprob"], tuple((token, value) for token, value in entry["top"]))
        for entry in table.get("logprobs", ())
    )
    return RowCommit(**{**table, "tokens": tuple(table["tokens"]), "logprobs": logprobs})
