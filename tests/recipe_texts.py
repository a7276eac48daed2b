"""Recipes as text, what is wrong with one, and a stage with a field of every type."""

from __future__ import annotations

import contextlib
from pathlib import Path

import attrs
import pytest
import tomli_w

from dspark import recipe as recipes
from dspark.errors import RecipeError
from dspark.stages.base import AbstractDraft
from dspark.stages.draft import NoDraft
from dspark.stages.registry import KINDS, register_draft

VALID = """
schema = 1
name = "all of it"
cap = {kind = "park", inner = {kind = "clip", inner = 6, hi = 8}, patience = 4}
[target]
source = "mlx-community/Qwen3-4B-4bit"
revision = "main"
kv_bits = 8
max_context = 4096
[prefill]
chunk = 512
[draft]
kind = "hybrid"
branches = [{kind = "lookup", min_ngram = 4}, {kind = "none"}]
[accept]
kind = "sample-match"
[sampling]
temperature = 0.7
top_p = 0.9
seed = 5
[rollback]
kind = "checkpoint"
[chat]
system = "Be brief."
thinking = false
template = {lang = "en"}
"""


def problems(text: str, *settings: str | recipes.Override) -> list[str]:
    """What is wrong with a recipe, without the file's name."""
    with pytest.raises(RecipeError) as caught:
        recipes.loads(text, "x.toml", settings)
    assert all(line.startswith("x.toml: ") for line in str(caught.value).splitlines())
    return list(caught.value.problems)


def minimal(**tables: object) -> str:
    return tomli_w.dumps({"schema": 1, "draft": {"kind": "lookup"}} | tables)


@attrs.frozen
class Several(NoDraft):
    """A stage with a field of every type that recipes know."""

    path: Path
    words: tuple[str, ...] = ()
    pairs: tuple[tuple[int, float], ...] = ()
    table: dict[str, float] = attrs.field(factory=dict)
    either: int | str = 0
    maybe: float | None = 1.5
    inner: AbstractDraft = attrs.field(factory=NoDraft)
    _private: int = 3
    weights: object = attrs.field(default=None, metadata={"key": False})


@contextlib.contextmanager
def registered():
    """Recipes may say kind = "several" meanwhile."""
    register_draft("several")(Several)
    yield
    del KINDS["draft"]["several"]
