"""`dspark recipes`: what is shipped, what it needs, and whether that is on this disk."""

from __future__ import annotations

import contextlib
from typing import Any

from dspark.blas import open_blas
from dspark.cli.failures import say
from dspark.cli.screen import Answer, short
from dspark.errors import DsparkError


def recipes() -> int:
    """Print a paragraph a recipe; a broken one is named on standard error and fails the command."""
    open_blas()
    from dspark.recipe import load, shipped

    answer, code = Answer(), 0
    for name, path in shipped():
        try:
            recipe = load(path)
        except DsparkError as error:
            say(f"dspark: {error}")
            code = error.exit_code
            continue
        answer.write(f"{name}\n    {recipe.description or recipe.name or ''}\n")
        for label, text in needs(name, recipe):
            answer.write(f"    {label:<8} {text}\n")
    return code


def needs(name: str, recipe: Any) -> list[tuple[str, str]]:
    """(label, text) for the target and each drafter that loads weights."""
    table = recipe.target
    if table.source is None:
        lines = [("target", f"any; name one: dspark run {name} --target SOURCE")]
    else:
        lines = [("target", f"{short(table.source)}, {_where(table.source, table.revision, table.sha256)}")]
    for source, revision in _drafters(recipe.draft):
        lines.append(("drafter", f"{short(source)}, {_where(source, revision, None)}"))
    return lines


def _drafters(draft: Any) -> list[tuple[str, str | None]]:
    found = [pair for branch in getattr(draft, "branches", ()) for pair in _drafters(branch)]
    if source := getattr(draft, "drafter", None):
        found.append((source, getattr(draft, "revision", None)))
    return found


def _where(source: str, revision: str | None, sha256: str | None) -> str:
    from dspark.checkpoints.sources import cached

    found = None
    with contextlib.suppress(DsparkError, ValueError):
        found = cached(source, revision, sha256=sha256)
    return "on this disk" if found else "not on this disk: the first run fetches it"
