"""`dspark calibrate`: measure what a recipe costs on this machine, keep it, and draw it."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

from dspark.blas import open_blas
from dspark.cli.calibrate_options import CalibrateOptions
from dspark.cli.failures import OK
from dspark.cli.measuring import Measuring
from dspark.cli.options import RunOptions
from dspark.cli.screen import Answer, PlainScreen, hushed, short
from dspark.errors import InputError
from dspark.telemetry.terminal import is_terminal, size

COLUMNS = 100


def calibrate(options: CalibrateOptions) -> int:
    """Measure or look up, print the report, and return the exit code."""
    if options.plot is not None:
        _check_plot(options.plot)
    answer = Answer()
    screen = PlainScreen(answer, options.quiet)
    with hushed(screen):
        open_blas()
        from dspark.cli.overrides import load_recipe

        recipe = load_recipe(_run_options(options))
        if recipe.draft.longest == 0:
            raise InputError(
                f"{recipe.path or options.recipe}: this recipe never drafts, so there is nothing to calibrate"
            )
        found, subject = _shown(recipe, options, screen) if options.show else _measured(recipe, options, screen)
    _print(found, subject, answer, options.plot)
    return OK


def _shown(recipe: Any, options: CalibrateOptions, screen: PlainScreen) -> tuple[Any, Any]:
    """What is stored: found by how the recipe names its target and drafter, else by what they are, for which they are loaded."""
    from dspark.calibrate.apply import asked_of, stored
    from dspark.calibrate.store import Store
    from dspark.platform import machine

    found = Store().load_asked(machine(), asked_of(recipe))
    if found.calibration is None:
        found = stored(_engine(recipe, screen))
        if found.note:
            screen.note(found.note)
    if found.calibration is None:
        raise InputError(
            f"nothing is stored for {options.recipe} on this machine; dspark calibrate {options.recipe} measures it"
        )
    return found.calibration, _subject(recipe, found.calibration, str(found.path))


def _measured(recipe: Any, options: CalibrateOptions, screen: PlainScreen) -> tuple[Any, Any]:
    from dspark.calibrate.apply import asked_of, label_of
    from dspark.calibrate.calibrator import calibrate as calibrate_engine

    engine = _engine(recipe, screen)
    with Measuring(not options.quiet) as tell:
        outcome = calibrate_engine(
            engine,
            label_of(recipe, engine),
            asked=asked_of(recipe),
            again=True,
            batches=(int(options.batch or 1),),
            quick=options.quick,
            progress=tell,
            waiting=lambda: screen.note("another process measures this machine; waiting for it"),
        )
    # The report has the notes on the figures; what is left is about the file.
    for note in outcome.notes:
        if note not in outcome.calibration.notes:
            screen.note(note)
    return outcome.calibration, _subject(
        recipe, outcome.calibration, str(outcome.path or "no file: it could not be written")
    )


def _engine(recipe: Any, screen: PlainScreen) -> Any:
    from dspark.assemble import assemble

    engine = assemble(recipe, progress=screen.download, say=screen.load)
    for note in engine.notes:
        screen.note(note)
    return engine


def _subject(recipe: Any, calibration: Any, where: str) -> Any:
    from dspark.calibrate.calibrator import USUAL_DEPTH, USUAL_RATE
    from dspark.calibrate.chart import Subject
    from dspark.caps import FixedCap

    costs = calibration.costs
    source = costs.sources[-1] if costs.sources else ""
    return Subject(
        recipe=recipe.path or "this recipe",
        target=short(recipe.target.source or "the target"),
        where=where,
        source=source,
        pinned=recipe.cap.cap if isinstance(recipe.cap, FixedCap) else None,
        begins=recipe.cap.begins_with,
        depth=USUAL_DEPTH,
        rates=costs.acceptance(source) or (USUAL_RATE,),
    )


def _print(calibration: Any, subject: Any, answer: Answer, plot: str | None) -> None:
    from rich.console import Console

    from dspark.calibrate.chart import report

    drawn = report(calibration, subject)
    colour = answer.on_terminal and is_terminal(sys.stdout)
    columns = size(sys.stdout)[0] if answer.on_terminal else COLUMNS
    console = Console(
        file=io.StringIO(), width=columns, force_terminal=colour, highlight=False, legacy_windows=False, record=True
    )
    console.print(drawn)
    text = console.export_text(styles=colour)
    answer.put("\n".join(line.rstrip() for line in text.split("\n")))
    if plot is not None:
        canvas = Console(file=io.StringIO(), width=COLUMNS, record=True, force_terminal=True, highlight=False)
        canvas.print(drawn)
        _write(plot, canvas.export_svg(title=f"dspark calibrate {Path(subject.recipe).stem}"))


def _check_plot(plot: str) -> None:
    """Raise InputError, before anything is measured, for a file that could not be written afterwards."""
    if not plot.endswith(".svg"):
        raise InputError(f"--plot {plot}: the plot is an SVG; give a name that ends in .svg")
    folder = Path(plot).expanduser().resolve().parent
    if not os.access(folder, os.W_OK):
        raise InputError(f"--plot {plot}: {folder} is no folder that can be written to")


def _write(plot: str, text: str) -> None:
    try:
        Path(plot).expanduser().write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise InputError(f"--plot {plot}: cannot be written ({error.strerror})") from None


def _run_options(options: CalibrateOptions) -> RunOptions:
    shared = ("target", "drafter", "dtype", "settings")
    return RunOptions(recipe=options.recipe, **{name: getattr(options, name) for name in shared})
