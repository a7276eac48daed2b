"""Recipes: a pipeline and its target as a TOML file, read strictly and written back."""

from dspark.recipe.document import Change, ChatTable, KernelsTable, Recipe, SamplingTable, TargetTable
from dspark.recipe.edit import Override, merge, override, parse_set
from dspark.recipe.find import shipped
from dspark.recipe.load import dump, dumps, load, loads, overlay

__all__ = [
    "Change",
    "ChatTable",
    "KernelsTable",
    "Override",
    "Recipe",
    "SamplingTable",
    "TargetTable",
    "dump",
    "dumps",
    "load",
    "loads",
    "merge",
    "overlay",
    "override",
    "parse_set",
    "shipped",
]
