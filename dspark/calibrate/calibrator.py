"""From an engine and this machine to a calibration: read from the store, or measured now and kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import attrs

from dspark.calibrate.identity import identity_of
from dspark.calibrate.measure import Measured, measure
from dspark.calibrate.record import Calibration, due, facts
from dspark.calibrate.store import Store
from dspark.calibrate.timing import Progress
from dspark.calibrate.widths import drafters, looks_up
from dspark.caps.curve import CostCurve
from dspark.caps.price import Choice, best_cap
from dspark.errors import InputError
from dspark.platform import machine

# Acceptance taken for granted where none was measured, and the context it is judged at.
USUAL_RATE, USUAL_DEPTH = 0.65, 512


class Outcome(NamedTuple):
    """A calibration; whether it was measured just now; sentences that the user should see; its file, None where it could not
    be written."""

    calibration: Calibration
    fresh: bool
    notes: tuple[str, ...] = ()
    path: Path | None = None


def calibrate(
    engine: Any,
    label: str,
    *,
    asked: str = "",
    store: Store | None = None,
    again: bool = False,
    batches: Sequence[int] = (),
    quick: bool = False,
    progress: Progress | None = None,
    waiting: Callable[[], None] | None = None,
) -> Outcome:
    """The calibration of an engine, measured unless the store has one. One of a disturbed machine is measured again, quickly,
    by the next runs, RETRIES at most; the better one stays.

    label: the recipe's name, for the file's; asked: `apply.asked_of` the recipe; again: measure whatever is stored;
    batches, quick: as in `measure`; waiting: called when another process measures on this machine, which is then waited
    for. A store that cannot be written to is a note, not an error. Raises InputError for a recipe that never drafts.
    """
    store, here, who = store or Store(), machine(), identity_of(engine)
    found = store.load(here, who)
    known = None if again else found.calibration
    if known is not None and not due(known):
        return Outcome(known, False, (), found.path)
    notes = [found.note] if found.note else []
    waited = False

    def wait() -> None:
        nonlocal waited
        waited = True
        if waiting is not None:
            waiting()

    with store.measuring(here, wait):
        if waited and (theirs := store.load(here, who)).calibration is not None:
            return Outcome(theirs.calibration, False, (), theirs.path)
        measured = measure(engine, batches=batches, quick=quick or known is not None, progress=progress)
        made = Calibration(
            facts(here),
            who,
            # As the file has it, so that the first run goes by the same figures as the second.
            CostCurve.from_dict(measured.costs.to_dict()),
            date.today().isoformat(),
            round(measured.seconds, 1),
            measured.notes,
            changes_for(engine, measured),
            asked,
        )
        if known is not None:
            made = better(known, made)
        path = None
        try:
            path = store.save(made, here, label)
        except InputError as error:
            notes.append(str(error))
    if known is not None and made.costs == known.costs:
        return Outcome(made, False, (*notes, "no quieter than before: the earlier figures stay"), path)
    return Outcome(made, True, (*notes, *measured.notes), path)


def better(old: Calibration, new: Calibration) -> Calibration:
    """Of two calibrations the quieter one, the lower spread deciding between two disturbed ones; it counts the tries."""
    noise = lambda c: (c.costs.disturbed, c.costs.spread)
    return attrs.evolve(old if noise(old) <= noise(new) else new, tries=old.tries + 1)


def changes_for(engine: Any, measured: Measured) -> dict[str, Any]:
    """Keys of the recipe that follow: its cap. None follows from a measurement that was disturbed."""
    choice = derived_cap(engine, measured.costs)
    return {"cap": {"start": choice.cap}} if choice is not None and measured.quiet else {}


def derived_cap(engine: Any, costs: CostCurve) -> Choice | None:
    """The fixed cap that suits a recipe's drafter on this machine; None where drafts are as long as a match deserves."""
    networks = [d for d in drafters(engine.pipeline.draft) if not looks_up(d)]
    if not networks:
        return None
    return derived_for(costs, networks[-1].sources[0])


def derived_for(costs: CostCurve, source: str) -> Choice:
    """The fixed cap that suits a network before any text is known: at what the curve says of its acceptance, or the usual."""
    return best_cap(costs, costs.acceptance(source) or (USUAL_RATE,), USUAL_DEPTH, source)
