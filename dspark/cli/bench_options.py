"""The options of `dspark bench` as one record."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import attrs

from dspark.cli.options import (
    DrafterSource,
    Dtype,
    NoCalibrate,
    OnlyReport,
    RecipeName,
    Settings,
    TargetSource,
    option,
    whole,
)
from dspark.errors import InputError, did_you_mean

AGAINST = ("plain", "mlx-lm", "mlx-vlm", "mlx-dspark", "mlx-vlm-stock", "mlx-dspark-stock")
STOCK = "-stock"


def _names(value: Any) -> Any:
    return tuple(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))


def _against(value: Any) -> Any:
    for name in _names(value):
        if name not in AGAINST:
            raise InputError(f"--against: unknown {name!r}; allowed: {', '.join(AGAINST)}{did_you_mean(name, AGAINST)}")
    return _names(value)


def _pairs(value: Any) -> Any:
    found = {}
    for text in value or ():
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise InputError(f"--peer-python {text}: expected NAME=PATH, as in mlx-dspark=/path/to/venv/bin/python")
        found[name] = str(Path(path).expanduser().absolute())
    return found


@attrs.frozen
class BenchOptions:
    """What `dspark bench` was told."""

    recipe: RecipeName
    against: Annotated[
        str, option(help=f"What to compare with, of {', '.join(AGAINST)}.", metavar="NAMES", show_default=True)
    ] = attrs.field(default="plain,mlx-lm", converter=_against)
    prompts: Annotated[
        str,
        option(
            help="Prompt sets, of chat, code, math, copy, long, or a .toml file.", metavar="NAMES", show_default=True
        ),
    ] = attrs.field(default="chat,code,math,copy", converter=_names)
    repeats: Annotated[str, option(help="Timed runs of each arm on each prompt.", metavar="N", show_default=True)] = (
        attrs.field(default="5", converter=whole("--repeats", 1))
    )
    max_tokens: Annotated[str, option(help="Most tokens of an answer.", metavar="N", show_default=True)] = attrs.field(
        default="128", converter=whole("--max-tokens", 1)
    )
    profile: Annotated[
        bool, option("--profile", help="Say where a round's time goes, part by part, instead of comparing.")
    ] = False
    json: Annotated[str | None, option(help="Write every run and figure to a file.", metavar="FILE")] = None
    peer_python: Annotated[
        list[str] | None,
        option(help="The Python of an environment that has a peer. Repeatable.", metavar="NAME=PATH"),
    ] = attrs.field(default=None, converter=_pairs)
    target: TargetSource = None
    drafter: DrafterSource = None
    dtype: Dtype = None
    cap: Annotated[str | None, option(help="Most drafted tokens a round.", metavar="N")] = attrs.field(
        default=None, converter=whole("--cap")
    )
    settings: Settings = None
    no_calibrate: NoCalibrate = False
    quiet: OnlyReport = False

    @property
    def compares(self) -> str:
        """The options given that only a comparison has, as a user writes them."""
        shared = ("against", "repeats", "peer_python")
        usual = BenchOptions(recipe=self.recipe)
        return ", ".join(f"--{n.replace('_', '-')}" for n in shared if getattr(self, n) != getattr(usual, n))
