"""What options make of a recipe: each is a value for a key, checked as if the file had said it."""

from __future__ import annotations

import contextlib
from typing import Any

import attrs

from dspark.cli.inputs import parse_template
from dspark.cli.options import RunOptions
from dspark.errors import InputError, UserError
from dspark.recipe import Override, Recipe, load
from dspark.recipe.faults import Keys
from dspark.recipe.schema import unstructure
from dspark.stages.keys import check_seed

KEYS: dict[str, tuple[str, ...]] = {
    "adapter_path": ("target", "adapter_path"),
    "dtype": ("target", "dtype"),
    "max_context": ("target", "max_context"),
    "cap": ("cap",),
    "system": ("chat", "system"),
    "thinking": ("chat", "thinking"),
    "reasoning_effort": ("chat", "reasoning_effort"),
    "temperature": ("sampling", "temperature"),
    "top_p": ("sampling", "top_p"),
    "top_k": ("sampling", "top_k"),
    "min_p": ("sampling", "min_p"),
}


# Keys that every stage with a drafter's weights has.
COMMON = ("bits", "group_size", "window")


def load_recipe(options: RunOptions) -> Recipe:
    """The recipe with the options in it. Raises SourceError, RecipeError or InputError."""
    settings = [*overrides(options), *(options.settings or ())]
    recipe = load(str(options.recipe), settings)
    if options.drafter is None:
        return recipe
    found = _loads_weights(recipe.draft, ("draft",))
    if found is None:
        raise InputError(f"--drafter {options.drafter}: this recipe's [draft] loads no weights; choose one that does")
    keys, stage = found
    # The recipe's revision is that of its own drafter, and another kind of drafter has no use for all of its keys.
    table = {key: value for key, value in unstructure(stage).items() if key != "revision"}
    kind = kind_of_drafter(options.drafter)
    if kind not in (None, table["kind"]):
        table = {key: value for key, value in table.items() if key in COMMON} | {"kind": kind}
    changed = Override(keys, table | {"drafter": options.drafter}, "--drafter")
    return load(str(options.recipe), [*settings, changed])


def kind_of_drafter(source: str) -> str | None:
    """The kind that a drafter's headers show; None where they cannot be had, which whoever loads it will say."""
    from dspark.checkpoints.drafter import inspect
    from dspark.cli.inspect import headers

    with contextlib.suppress(UserError), headers(source, None) as path:
        return inspect(path).kind or None
    return None


def overrides(options: RunOptions) -> list[Override]:
    """The options that were given, as overrides."""
    found = []
    if options.target is not None:
        # All of the table: a revision or a digest of the recipe's own target says nothing about another one.
        found.append(Override(("target",), {"source": options.target}, "--target"))
    if options.plain:
        found += [Override(("draft",), {"kind": "none"}, "--plain"), Override(("cap",), 0, "--plain")]
    for name, keys in KEYS.items():
        value = getattr(options, name)
        if value is not None and not (name == "cap" and options.plain):
            found.append(Override(keys, value, _flag(name, value)))
    if options.raw:
        found.append(Override(("chat", "raw"), True, "--raw"))
    for key, value in parse_template(options.chat_template_kwargs).items():
        found.append(Override(("chat", "template", key), value, "--chat-template-kwargs"))
    if options.seed is not None:
        found.append(Override(("sampling", "seed"), check_seed(options.seed), "--seed"))
    return found


def _flag(name: str, value: Any) -> str:
    return "--no-thinking" if (name, value) == ("thinking", False) else f"--{name.replace('_', '-')}"


def _loads_weights(draft: Any, at: Keys) -> tuple[Keys, Any] | None:
    """Where the drafter stands that loads weights, and its stage: the draft itself, or the first such branch of it."""
    if "drafter" in attrs.fields_dict(type(draft)):
        return at, draft
    branches = enumerate(getattr(draft, "branches", ()))
    return next((found for i, b in branches if (found := _loads_weights(b, (*at, "branches", i)))), None)
