"""Reading and writing recipes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import tomli_w

from dspark.errors import InputError, RecipeError
from dspark.pipeline import Pipeline
from dspark.recipe import edit, schema
from dspark.recipe.document import SCHEMA, Change, Recipe
from dspark.recipe.edit import ABSENT, Data, Edit, Override
from dspark.recipe.faults import Fault, Keys, key_path, show
from dspark.recipe.find import find

PLACES = ("target", "draft")
DEEP = "tables or arrays are nested too deeply"
LINE = re.compile(r" \(at line (\d+), column (\d+)\)$")


def load(name: str | Path, settings: Iterable[str | Override] = ()) -> Recipe:
    """Read a recipe: a shipped one's name, a path, or `hf://user/repo/file.toml[@revision]`.

    `settings` are `key.path=value` as behind `--set`, or overrides. Raises SourceError where there is no such recipe and
    RecipeError with every fault of it at once. Paths in [target] and [draft] that begin with `./` or `../` start from
    the recipe's folder.
    """
    found = find(name)
    return _build(_parse(found.text, found.path), found.path, settings, folder=found.folder, placed=True)


def loads(text: str, path: str = "recipe", settings: Iterable[str | Override] = ()) -> Recipe:
    """Read a recipe from text; `path` is what errors call it. Relative paths stay as they are."""
    return _build(_parse(text, path), path, settings)


def overlay(recipe: Recipe, table: Mapping[str, Any], source: str) -> Recipe:
    """The recipe with a table's values in it and the changes noted, `source` being who asks for them."""
    data, edits = edit.merge(schema.unstructure(recipe), table, source)
    changed = _structured(data, source, edits, [])
    return attrs.evolve(changed, path=recipe.path, changes=recipe.changes + changed.changes)


def dumps(thing: Recipe | Pipeline) -> str:
    """The recipe that makes `thing`: only what is no default. Raises InputError naming a stage that recipes have no word for."""
    try:
        return tomli_w.dumps(schema.unstructure(Recipe.of(thing) if isinstance(thing, Pipeline) else thing))
    except Fault as fault:
        raise InputError(f"this pipeline has no recipe: {fault}") from None


def dump(thing: Recipe | Pipeline, path: str | Path) -> None:
    """Write `dumps(thing)` to a file, which loads again to an equal pipeline. Comments of an earlier file there are lost."""
    text = dumps(thing)
    try:
        Path(path).write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def _parse(text: str, path: str) -> Data:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise RecipeError(path, [DEEP]) from None
    except ValueError as error:
        where = LINE.search(str(error))
        place = f"line {where[1]}, column {where[2]}: " if where else ""
        raise RecipeError(path, [f"{place}not valid TOML: {LINE.sub('', str(error))}"]) from None


def _build(
    data: Data, path: str, settings: Iterable[str | Override], folder: Path | None = None, placed: bool = False
) -> Recipe:
    said = data.get("schema")
    if type(said) is int and said != SCHEMA:
        newer = "update dspark to read it" if said > SCHEMA else f"write schema = {SCHEMA}"
        raise RecipeError(path, [f"schema: the file says {said} and this dspark reads schema {SCHEMA}; {newer}"])
    try:
        lost = list(_settle_paths(data, folder)) if placed else []
        changed, edits, faults = edit.override(data, settings)
        return attrs.evolve(_structured(changed, path, edits, lost + faults), path=path)
    except RecursionError:
        raise RecipeError(path, [DEEP]) from None


def _structured(data: Data, path: str, edits: list[Edit], problems: list[str]) -> Recipe:
    """The recipe, or RecipeError with the problems known already and those found now."""
    recipe, faults = schema.structure(data)
    problems = [*problems, *(f"{_called(keys, edits, path)}{text}" for keys, text in faults)]
    if problems or recipe is None:
        raise RecipeError(path, problems)
    changes = tuple(
        Change(key_path(e.keys), schema.default_of(recipe, e.keys) if e.old is ABSENT else e.old, e.new, e.label)
        for e in edits
    )
    return attrs.evolve(recipe, changes=changes)


def _called(keys: Keys, edits: list[Edit], path: str) -> str:
    """How a fault's place is called: by its key path, or by the option that put the value there."""
    for made in reversed(edits):
        if made.label == path or not made.covers(keys):
            continue
        rest = key_path(keys[len(made.keys) :])
        if made.label.startswith("--set"):
            return f"{made.label}{'.' if rest and rest[0] != '[' else ''}{rest}: "
        return f"{made.label}: {key_path(keys)}: " if rest else f"{made.label}: "
    return f"{key_path(keys)}: " if keys else ""


def _settle_paths(data: Data, folder: Path | None) -> Iterator[str]:
    """Make `./` and `../` in the tables that name weights start from the recipe's folder; yields what cannot be."""
    for name in PLACES:
        for table, key, at in _strings(data.get(name), (name,)):
            if not table[key].startswith(("./", "../")):
                continue
            if folder is None:
                yield f"{key_path(at)}: {show(table[key])} lies beside a recipe from the hub; name a repository instead"
            else:
                table[key] = str((folder / table[key]).resolve())


def _strings(value: Any, at: Keys) -> Iterator[tuple[Any, Any, Keys]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        if isinstance(inner, str):
            yield value, key, (*at, key)
        else:
            yield from _strings(inner, (*at, key))
