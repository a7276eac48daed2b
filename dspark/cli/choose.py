"""`dspark run --target SOURCE` without a recipe, or with `auto`: the shipped recipe for that target, else lookup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from dspark.cli.options import RunOptions
from dspark.cli.screen import short
from dspark.errors import InputError

AUTO, FALLBACK = "auto", "lookup"


def sort_out(options: RunOptions) -> RunOptions:
    """The same with a recipe, `auto` where none was named: behind `--target` a first argument with a space in it is the
    prompt. Raises InputError where neither a recipe nor a target is named."""
    recipe, prompt = options.recipe, options.prompt
    if options.target is not None and prompt is None and recipe is not None and any(c.isspace() for c in recipe):
        recipe, prompt = AUTO, recipe
    if options.target is None and prompt is None and recipe is not None and any(c.isspace() for c in recipe):
        raise InputError(f"{recipe!r} was read as the recipe's name: put a recipe in front of it, as smollm2-135m")
    if recipe is None:
        recipe = AUTO
    if recipe == AUTO and options.target is None:
        raise InputError(
            "there is no recipe: name one (dspark recipes lists them), or a target with --target, for which one is found"
        )
    return attrs.evolve(options, recipe=recipe, prompt=prompt)


def choose(options: RunOptions, note: Callable[[str], Any]) -> RunOptions:
    """`auto` as a shipped recipe's name; `note` is told which it is. Reads the target's config where a name fits, and
    fetches that much of it."""
    if options.recipe != AUTO:
        return options
    source = str(options.target)
    if options.plain:
        return attrs.evolve(options, recipe=FALLBACK)
    from dspark.recipe.match import match

    found = match(source, lambda: read_target_config(source))
    if found is None:
        note(f"no shipped recipe is for {short(source)}, so lookup drafts; dspark recipes lists what there is")
    else:
        note(f"{short(source)} runs by the recipe {found}")
    return attrs.evolve(options, recipe=found or FALLBACK)


def read_target_config(source: str) -> dict[str, Any]:
    """The target's config.json, or what a GGUF file says in its place."""
    from dspark.checkpoints.gguf_config import read_config
    from dspark.checkpoints.gguf_header import read_header
    from dspark.checkpoints.hub import CONFIG_PATTERNS
    from dspark.checkpoints.loaders import read_folder_config
    from dspark.checkpoints.sources import resolve

    files = resolve(source, patterns=CONFIG_PATTERNS)
    return read_config(read_header(files.path)) if files.is_gguf else read_folder_config(files.path)
