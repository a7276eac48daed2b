"""What a calibration makes of an engine: its curve, and a cap that begins where this machine should."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs

from dspark.calibrate.identity import identity_of
from dspark.calibrate.record import Calibration
from dspark.calibrate.store import Found, Store
from dspark.caps import AbstractCap
from dspark.engine import Engine
from dspark.platform import machine

if TYPE_CHECKING:
    from dspark.recipe.document import Recipe


class Applied(NamedTuple):
    """A calibration that an engine runs on. path: its file, None where it could not be written; old, new: the cap to begin
    with, before and now, None where the controller cannot be told one."""

    calibration: Calibration
    path: Path | None
    old: int | None
    new: int | None

    @property
    def changed(self) -> bool:
        return self.old != self.new

    def source(self) -> str:
        """`calibrated: Apple M3 Max, mlx 0.32.4, 2026-08-30, dearer at 5 rows (+21 %)`"""
        return f"calibrated: {self.calibration.source()}"


def stored(engine: Any, store: Store | None = None) -> Found:
    """What the store has for this engine on this machine."""
    return (store or Store()).load(machine(), identity_of(engine))


def told(cap: AbstractCap, calibration: Calibration, path: Path | None) -> tuple[AbstractCap, Applied]:
    """The cap that begins as calibrated, and what became of it. A cap that is fixed stays."""
    now = cap if calibration.start is None else cap.starting(calibration.start)
    return now, Applied(calibration, path, cap.begins_with, now.begins_with)


def apply(engine: Engine, calibration: Calibration, path: Path | None = None) -> Engine:
    """The engine with the calibration's curve, and with its cap where the recipe leaves the cap open. A fixed cap stays."""
    cap, applied = told(engine.pipeline.cap, calibration, path)
    return attrs.evolve(
        engine, pipeline=attrs.evolve(engine.pipeline, cap=cap), costs=calibration.costs, calibration=applied
    )


def with_stored(engine: Engine, store: Store | None = None) -> Engine:
    """The engine with what the store has for it, if the store has anything. Nothing is measured; a file that cannot be used
    becomes a note. Costs a look at the shapes of the weights and one small file."""
    if not wanted(engine):
        return engine
    found = stored(engine, store)
    if found.calibration is not None:
        return apply(engine, found.calibration, found.path)
    return attrs.evolve(engine, notes=(*engine.notes, found.note)) if found.note else engine


def wanted(engine: Engine) -> bool:
    """Whether a calibration would change what an engine does: it drafts, and its cap is not fixed."""
    return engine.pipeline.draft.longest != 0 and engine.pipeline.cap.wants_costs


def label_of(recipe: Recipe | None, engine: Engine) -> str:
    """What a calibration's file is called: after the recipe's, or after the target."""
    return Path(recipe.path).stem if recipe is not None and recipe.path else str(engine.target.name)


def asked_of(recipe: Recipe | None) -> str:
    """A digest of target and draft as a recipe names them, by which `explain` finds a calibration without loading either;
    nothing where no recipe says what they are."""
    if recipe is None or recipe.target.source is None:
        return ""
    from dspark.recipe.schema import unstructure

    text = json.dumps([unstructure(recipe.target), unstructure(recipe.draft)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
