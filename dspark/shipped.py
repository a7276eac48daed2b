"""The recipes that come with dspark. Apart from the reader of recipes, so that shell completion need not load it."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def shipped() -> list[tuple[str, Path]]:
    """(name, path) of each: a checkout's own folder, else the wheel's copy."""
    checkout = PACKAGE.parent / "recipes"
    folder = checkout if (PACKAGE.parent / "pyproject.toml").is_file() and checkout.is_dir() else PACKAGE / "_recipes"
    return sorted((path.stem, path) for path in folder.glob("*.toml"))
