"""A run's own files: its state, exact to the bit, and its log."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from dspark.errors import InputError
from dspark.train.optimise import State
from dspark.train.recipe import TrainRecipe

STATE = "state.safetensors"
LOG = "log.jsonl"


@attrs.define
class Progress:
    """Where a run stands beside its arrays. total: steps of the whole run, fixed at its start; trained_s: seconds spent in
    steps; history: evaluations so far."""

    total: int
    trained_s: float = 0.0
    history: list[dict[str, Any]] = attrs.field(factory=list)


def digest_of(recipe: TrainRecipe) -> str:
    """What a state belongs to: everything that shapes the run, which the output folder does not."""
    said = attrs.asdict(recipe)
    for name in ("output", "path"):
        said.pop(name)
    said["data"].pop("folder")
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]


def save_state(folder: Path, recipe: TrainRecipe, state: State, progress: Progress) -> None:
    """Write the state so that an older one survives until the new one is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {
        f"{part}.{name}": array
        for part in ("parameters", "first", "second")
        for name, array in tree_flatten(getattr(state, part))
    }
    said = {"step": state.step, "digest": digest_of(recipe), **attrs.asdict(progress)}
    part = folder / f"part-{STATE}"
    mx.save_safetensors(str(part), arrays, metadata={"dspark": json.dumps(said)})
    os.replace(part, folder / STATE)


def load_state(folder: Path, recipe: TrainRecipe) -> tuple[State, Progress]:
    """The state that a run left. Raises InputError where there is none, or one of another recipe."""
    file = folder / STATE
    if not file.is_file():
        raise InputError(f"{folder}: there is no {STATE} to go on from; drop --resume")
    loaded: Any = mx.load(str(file), return_metadata=True)
    arrays, metadata = loaded
    said = json.loads(metadata["dspark"])
    if said.pop("digest") != digest_of(recipe):
        raise InputError(f"{file}: it belongs to a recipe that said something else; restore it or drop --resume")
    step = said.pop("step")
    trees: Any = (
        tree_unflatten([(k.removeprefix(f"{part}."), v) for k, v in arrays.items() if k.startswith(f"{part}.")])
        for part in ("parameters", "first", "second")
    )
    parameters, first, second = trees
    return State(parameters, first, second, step), Progress(**said)


def log(folder: Path, **said: Any) -> None:
    """Add a line to the run's log."""
    with open(folder / LOG, "a", encoding="utf-8") as out:
        out.write(json.dumps(said) + "\n")
