"""What calibration does to a run: the stored figures, or those measured at a recipe's first run."""

from __future__ import annotations

from typing import Any

import attrs

from dspark.cli.screen import Screen


def calibrated(recipe: Any, engine: Any, screen: Screen, measure: bool = True, batch: int = 1) -> tuple[Any, Any]:
    """Recipe and engine as this machine's calibration makes them. Where the cap is open and nothing is stored, the machine is
    measured now, `batch` sequences at once too, unless `measure` is False. A fixed cap stays, and nothing is looked up."""
    from dspark.calibrate.apply import apply, asked_of, label_of, stored, wanted
    from dspark.calibrate.record import due

    if not wanted(engine):
        return recipe, engine
    found = stored(engine)
    again = measure and found.calibration is not None and due(found.calibration)
    if found.calibration is not None and not again:
        return changed(recipe, apply(engine, found.calibration, found.path))
    if found.note:
        screen.note(found.note if measure else f"{found.note} (not now, because of --no-calibrate)")
    if not measure:
        return recipe, engine
    from dspark.calibrate.calibrator import calibrate

    if again:
        screen.note(
            "the machine was disturbed when it was calibrated: measuring again, quickly; --no-calibrate skips it"
        )
    else:
        screen.note("the first run of this recipe here: measuring what it costs, once; --no-calibrate skips it")
    outcome = calibrate(
        engine,
        label_of(recipe, engine),
        asked=asked_of(recipe),
        batches=(batch,),
        progress=screen.measuring,
        waiting=lambda: screen.note("another process measures this machine; waiting for it"),
    )
    for note in outcome.notes:
        screen.note(note)
    if outcome.fresh:
        kept = f"; kept in {outcome.path}" if outcome.path else ""
        screen.note(f"measured in {outcome.calibration.seconds:.0f} s{kept}")
    return changed(recipe, apply(engine, outcome.calibration, outcome.path))


def changed(recipe: Any, engine: Any) -> tuple[Any, Any]:
    """The recipe with the cap that its engine now has, the change noted."""
    from dspark.recipe.document import Change

    applied = engine.calibration
    if not applied.changed:
        return recipe, engine
    change = Change("cap.start", applied.old, applied.new, f"{applied.source()}; {applied.path or 'not kept'}")
    return attrs.evolve(recipe, cap=engine.pipeline.cap, changes=(*recipe.changes, change)), engine
