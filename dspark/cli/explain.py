"""`dspark explain`: what a recipe does and promises; with --proof also how its target rolls back, and that it does."""

from __future__ import annotations

from typing import Any

from dspark.blas import open_blas
from dspark.cli.screen import Answer, PlainScreen, hushed


def explain(name: str, target: str | None, settings: tuple[str, ...], proof: bool) -> int:
    """Print the lines and return the exit code."""
    open_blas()
    from dspark import explain as words
    from dspark.recipe import Override, load

    chosen = [] if target is None else [Override(("target",), {"source": target}, "--target")]
    recipe = load(name, [*chosen, *settings])
    answer = Answer()
    if proof:
        from dspark.assemble import assemble
        from dspark.cli.calibrated import calibrated

        screen = PlainScreen(answer, quiet=True)
        with hushed(screen):
            engine = assemble(recipe, progress=screen.download)
            _, engine = calibrated(recipe, engine, screen, measure=False)
            lines = [*about(recipe), *words.explain_bound(engine)]
    else:
        lines = [*about(recipe), *wanted_target(recipe), *static(recipe)]
    answer.write(words.table(lines) + "\n")
    return 0


def about(recipe: Any) -> list[tuple[str, str]]:
    """Which recipe it is, and what was changed in it."""
    title = ": ".join(text for text in (recipe.name, recipe.description) if text)
    lines = [("recipe", f"{recipe.path}{f' ({title})' if title else ''}")]
    return lines + [("changed", f"{change} ({change.source})") for change in recipe.changes]


def wanted_target(recipe: Any) -> list[tuple[str, str]]:
    """The target as the recipe names it."""
    table = recipe.target
    if table.source is None:
        return [("target", "left open; name one with --target")]
    pins = [f"{name} {value[:12]}" for name in ("revision", "sha256") if (value := getattr(table, name))]
    return [("target", ", ".join([table.source, *pins]))]


def static(recipe: Any) -> list[tuple[str, str]]:
    """What holds whatever the target is."""
    from dspark.explain import cap_lines, replaced
    from dspark.explain import explain as lines_of

    lines = lines_of(recipe.pipeline())
    if recipe.draft.longest != 0 and recipe.cap.wants_costs:
        lines = replaced(lines, "cap", cap_lines(*_told(recipe)))
    if recipe.accept == "auto" and not recipe.sampling.said:
        lines = [
            (label, f"{text}, unless the model's own defaults ask for sampling" if label == "accept" else text)
            for label, text in lines
        ]
    return [*lines, ("", "--proof loads the target, plans the rollback of its layers and proves it")]


def _told(recipe: Any) -> tuple[Any, Any]:
    """The cap and what calibration made of it, by how the recipe names its target and drafter."""
    from dspark.calibrate.apply import asked_of, told
    from dspark.calibrate.store import Store
    from dspark.platform import machine

    found = Store().load_asked(machine(), asked_of(recipe))
    return (recipe.cap, None) if found.calibration is None else told(recipe.cap, found.calibration, found.path)
