"""The options of `dspark calibrate` as one record."""

from __future__ import annotations

from typing import Annotated

import attrs

from dspark.cli.options import DrafterSource, Dtype, OnlyReport, RecipeName, Settings, TargetSource, option, whole
from dspark.errors import InputError


@attrs.frozen
class CalibrateOptions:
    """What `dspark calibrate` was told."""

    recipe: RecipeName
    show: Annotated[bool, option("--show", help="Print what is stored, measure nothing.")] = False
    plot: Annotated[str | None, option(help="Write the report as a picture, too.", metavar="FILE.svg")] = None
    quick: Annotated[bool, option("--quick", help="Fewer widths, one context depth, a quarter of the time.")] = False
    batch: Annotated[str | None, option(help="Measure N sequences at once, too.", metavar="N")] = attrs.field(
        default=None, converter=whole("--batch", 1)
    )
    target: TargetSource = None
    drafter: DrafterSource = None
    dtype: Dtype = None
    settings: Settings = None
    quiet: OnlyReport = False

    def __attrs_post_init__(self) -> None:
        for name, given in (("--quick", self.quick), ("--batch", self.batch is not None)):
            if self.show and given:
                raise InputError(f"--show measures nothing; drop {name}")
