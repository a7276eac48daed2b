"""Where recipes are: shipped ones by name, files by path, `hf://user/repo/file.toml[@revision]` on the hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from dspark.checkpoints.hub import hub_file
from dspark.errors import RecipeError, SourceError, did_you_mean
from dspark.shipped import shipped

LARGEST = 1 << 20
HUB = re.compile(r"hf://(?P<repo>[^/@\s]+/[^/@\s]+)/(?P<file>[^@\s]+\.toml)(?:@(?P<revision>[^@\s]+))?")
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


class Found(NamedTuple):
    """A recipe's text. `folder` is what its relative paths start from, None for a recipe from the hub."""

    text: str
    path: str
    folder: Path | None


def find(name: str | Path) -> Found:
    """The text of a recipe. Raises SourceError where there is none, RecipeError where it is no text."""
    name = str(name)
    if not name.strip():
        raise SourceError(_missing("(no name)"))
    if name.startswith("hf://"):
        return Found(_read(_download(name), name), name, None)
    known = dict(shipped())
    path = known.get(name) or Path(name).expanduser()
    return Found(_read(path, _short(path) if name in known else name), _short(path), path.absolute().parent)


def _short(path: Path) -> str:
    """A path as seen from the working directory, if it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _read(path: Path, shown: str) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise SourceError(_missing(shown)) from None
    except IsADirectoryError:
        raise SourceError(f"{shown}: this is a folder; a recipe is a file that ends in .toml") from None
    except (OSError, ValueError) as error:
        raise SourceError(f"{shown!r}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > LARGEST:
        raise RecipeError(shown, ["larger than 1 MB; a recipe is a short TOML file"])
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise RecipeError(shown, [f"line {line}: not UTF-8: byte 0x{raw[error.start]:02x}; save it as UTF-8"]) from None


def _missing(name: str) -> str:
    names = [known for known, _ in shipped()]
    stem = Path(name).stem if name.endswith(".toml") else name
    text = f"{name}: no such recipe or file; `dspark recipes` lists those that are shipped{did_you_mean(stem, names)}"
    if REPOSITORY.fullmatch(name) and not name.endswith(".toml"):
        text += f"; for a model write: dspark run lookup --target {name}"
    return text


def _download(name: str) -> Path:
    match = HUB.fullmatch(name)
    if match is None:
        raise SourceError(f"{name}: expected hf://user/repo/file.toml, and @revision behind it where one is meant")
    try:
        return hub_file(match["repo"], match["file"], match["revision"])
    except SourceError as error:
        raise SourceError(f"{name}: the recipe cannot be fetched: {error}") from error
