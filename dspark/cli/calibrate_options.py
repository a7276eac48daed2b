"""The options of `dspark calibrate` as one record."""

from __future__ import annotations

from typing import Annotated

import attrs
import typer

from dspark.cli.options import complete_recipe, option, whole
from dspark.errors import InputError


@attrs.frozen
class CalibrateOptions:
    """What `dspark calibrate` was told."""

    recipe: Annotated[
        str,
        typer.Argument(
            help="A shipped recipe's name, a file, or hf://user/repo/file.toml.", autocompletion=complete_recipe
        ),
    ]
    show: Annotated[bool, option("--show", help="Print what is stored, measure nothing.")] = False
    plot: Annotated[str | None, option(help="Write the report as a picture, too.", metavar="FILE.svg")] = None
    quick: Annotated[bool, option("--quick", help="Fewer widths, one context depth, a quarter of the time.")] = False
    batch: Annotated[str | None, option(help="Measure N sequences at once, too.", metavar="N")] = attrs.field(
        default=None, converter=whole("--batch", 1)
    )
    target: Annotated[
        str | None, option(help="Another target: a hub repository, folder or GGUF file.", metavar="SOURCE")
    ] = None
    drafter: Annotated[str | None, option(help="Another source for the drafter's weights.", metavar="SOURCE")] = None
    dtype: Annotated[
        str | None, option(help="Compute in float32, float16, bfloat16, or as stored.", metavar="NAME")
    ] = None
    settings: Annotated[
        list[str] | None,
        option("--set", help="Override a key of the recipe, as in draft.min_ngram=5. Repeatable.", metavar="KEY=VALUE"),
    ] = None
    quiet: Annotated[bool, option("--quiet", "-q", help="Nothing but the report and errors.")] = False

    def __attrs_post_init__(self) -> None:
        for name, given in (("--quick", self.quick), ("--batch", self.batch is not None)):
            if self.show and given:
                raise InputError(f"--show measures nothing; drop {name}")
