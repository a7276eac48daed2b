"""Which rollback each layer's cache gets, decided by what the cache is and does, never by its family's name.

A plan lists a roller for every leaf cache. If one of them can only rewind, all rewind and the kept tokens are fed again in
front of the next block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from dspark.buffers.leaves import is_append_only, is_concatenating, is_recurrent, is_rotating, leaves
from dspark.buffers.rollers import (
    AbstractRoller,
    CheckpointRoller,
    CutRoller,
    PositionCheckpoint,
    ReplayRoller,
    TrimRoller,
    WindowRoller,
)
from dspark.errors import BindError

METHODS = ("auto", "kv-trim", "recurrence-replay", "checkpoint")


@attrs.frozen
class LayerPlan:
    """One line of a plan: cache number in the list (dots for members of a cache list), its class, and its roller."""

    index: str
    cache: str
    roller: AbstractRoller


@attrs.frozen
class Plan:
    """The rollback of every leaf cache, in the order of `leaves`."""

    layers: tuple[LayerPlan, ...]
    method: str = "auto"

    @property
    def refeeds(self) -> bool:
        """Whether a rejection is repaid by feeding the kept tokens again."""
        return any(layer.roller.refeeds for layer in self.layers)

    @property
    def records(self) -> bool:
        """Whether forwards must be recorded."""
        return not self.refeeds and any(layer.roller.records for layer in self.layers)

    def summary(self) -> str:
        """`kv-trim (36 of 36)`, for `explain`."""
        counts: dict[str, int] = {}
        for layer in self.layers:
            counts[layer.roller.method] = counts.get(layer.roller.method, 0) + 1
        return ", ".join(f"{method} ({n} of {len(self.layers)})" for method, n in counts.items()) or "no caches"

    def lines(self) -> list[str]:
        """One line a kind of layer: which caches, what they are, how they come back, what that costs."""
        kinds: dict[tuple[str, str, str, str], list[str]] = {}
        for layer in self.layers:
            key = (layer.cache, layer.roller.method, layer.roller.detail, layer.roller.cost)
            kinds.setdefault(key, []).append(layer.index)
        return [
            f"{len(where)} x {cache}: {method}{f' ({detail})' if detail else ''}; a rejection costs {cost}"
            for (cache, method, detail, cost), where in kinds.items()
        ]

    def demoted(self, indices: Sequence[str]) -> Plan:
        """The same plan with these leaves' recurrences replayed by their whole module, or else checkpointed."""
        return attrs.evolve(
            self,
            layers=tuple(_demote(layer) if layer.index in indices else layer for layer in self.layers),
        )


def make_plan(caches: Sequence[Any], method: str = "auto", replays: Mapping[int, Any] | None = None) -> Plan:
    """Plan the rollback of a fresh cache list. `replays`: how the target rebuilds each recurrent leaf (`Target.replays`).

    Raises BindError, naming layer, class and choices, where a layer cannot be restored by `method`.
    """
    layers = []
    for place, (index, cache) in enumerate(leaves(caches)):
        how = (replays or {}).get(place)
        roller = choose(cache, method, how)
        if roller is None:
            works = [m for m in METHODS if choose(cache, m, how) is not None]
            raise BindError(
                f"layer {index} caches a {type(cache).__name__}, which {method!r} cannot roll back; "
                f"works: {', '.join(works)}"
            )
        layers.append(LayerPlan(index, type(cache).__name__, roller))
    return Plan(tuple(layers), method)


def choose(cache: Any, method: str, how: Any = None) -> AbstractRoller | None:
    """The roller that a method means for a cache, or None where it cannot serve."""
    if method == "checkpoint":
        return PositionCheckpoint() if is_append_only(cache) else CheckpointRoller()
    if (trim := _trim(cache)) is not None:
        return trim
    if method in ("auto", "recurrence-replay") and is_recurrent(cache) and how is not None:
        return ReplayRoller(how)
    return CheckpointRoller() if method == "auto" else None


def _trim(cache: Any) -> AbstractRoller | None:
    if is_append_only(cache):
        return TrimRoller()
    if is_concatenating(cache):
        return CutRoller()
    return WindowRoller() if is_rotating(cache) else None


def _demote(layer: LayerPlan) -> LayerPlan:
    roller = layer.roller
    if isinstance(roller, ReplayRoller) and roller.how.slots is not None and roller.how.alone:
        return attrs.evolve(layer, roller=ReplayRoller(attrs.evolve(roller.how, slots=None)))
    return attrs.evolve(layer, roller=CheckpointRoller())
