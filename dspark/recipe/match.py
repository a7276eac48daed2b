"""Find the shipped recipe for a target: by its repository, else by the model it is a copy of and what its config says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

from dspark.errors import DsparkError
from dspark.models.target import text_config
from dspark.recipe.document import Recipe
from dspark.recipe.load import load
from dspark.shipped import shipped

# What may stand behind a model's name without making it another model: how it is packed and for which program.
SUFFIXES = (
    r"[2-8]-?bit",
    r"int[48]",
    r"bf16|fp16|f16|fp32|f32",
    r"mxfp4|mxfp8|nvfp4|fp8",
    r"i?q[2-8](?:_[01k]|_k_[sml]|_xx?s|_nl)?",
    r"mlx",
    r"gguf",
    r"dwq",
    r"gs(?:32|64|128)",
)
SUFFIX = re.compile(rf"[-_.](?:{'|'.join(SUFFIXES)})$")
HUB_PREFIX = "hf://"

Config = Mapping[str, Any]


def match(source: str, config: Config | Callable[[], Config]) -> str | None:
    """The name of the shipped recipe for a target, None where none is for it.

    A recipe fits whose target is this very source, or one whose name is the same up to how it is packed (`base_name`) and
    whose `target.config` agrees with `config`, the target's config.json. Of several the one for this source is taken, then
    the one with the shortest name. `config` may be a function, called only where a name fits.
    """
    source = source.removeprefix(HUB_PREFIX).rstrip("/")
    base, found = base_name(source), []
    for name, recipe in _with_target():
        own = str(recipe.target.source)
        if own.lower() == source.lower():
            found.append((0, len(name), name))
        elif base and base_name(own) == base:
            config = config() if callable(config) else config
            if agrees(config, recipe.target.config):
                found.append((1, len(name), name))
    return min(found)[2] if found else None


def base_name(source: str) -> str:
    """A source's model, in small letters: the last part of its name less what says how it is packed.

    `mlx-community/Qwen3-8B-4bit` and `Qwen/Qwen3-8B` are both qwen3-8b; `my-qwen3-8b-x` is itself.
    """
    name = PurePath(source.removeprefix(HUB_PREFIX)).name.lower().removesuffix(".gguf")
    while (shorter := SUFFIX.sub("", name)) != name:
        name = shorter
    return name


def agrees(config: Config, wanted: Config) -> bool:
    """Whether a config.json says what is wanted, at its top or of its language model."""
    inner = text_config(dict(config))
    return all(value in (config.get(key), inner.get(key)) for key, value in wanted.items())


def _with_target() -> Iterator[tuple[str, Recipe]]:
    for name, path in shipped():
        try:
            recipe = load(path)
        except DsparkError:
            # A broken recipe is named by `dspark recipes`; others may still be found.
            continue
        if recipe.target.source is not None:
            yield name, recipe
