"""The prompt sets: ours by name, or a TOML file of the same shape."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path

import attrs

from dspark.errors import InputError, did_you_mean

NAMES = ("chat", "code", "math", "copy", "long")


@attrs.frozen
class PromptSet:
    """Prompts of one kind. about: what they have in common, in a sentence."""

    name: str
    about: str
    prompts: tuple[str, ...]


def read_set(name: str) -> PromptSet:
    """A shipped set, or a file `NAME.toml` with `prompts = [...]` and, as wanted, `about` and a `document` that stands in front
    of each prompt. Raises InputError, one sentence."""
    if name in NAMES:
        return _parse(name, name, files("dspark.bench").joinpath("prompts", f"{name}.toml").read_text(encoding="utf-8"))
    if not name.endswith(".toml"):
        raise InputError(
            f"--prompts: there is no set {name!r}; known are {', '.join(NAMES)}, and files that end in .toml"
            f"{did_you_mean(name, NAMES)}"
        )
    try:
        return _parse(Path(name).stem, name, Path(name).expanduser().read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise InputError(f"{name}: not UTF-8; save it as UTF-8") from None
    except OSError as error:
        raise InputError(f"{name}: cannot be read ({error.strerror})") from None


def _parse(name: str, path: str, text: str) -> PromptSet:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not valid TOML ({error})") from None
    if unknown := sorted(table.keys() - {"about", "document", "prompts"}):
        raise InputError(f"{path}: unknown key {unknown[0]!r}; allowed: about, document, prompts")
    prompts, document, about = table.get("prompts"), table.get("document", ""), table.get("about", "")
    if not isinstance(document, str) or not isinstance(about, str):
        raise InputError(f"{path}: document and about must be strings")
    if not isinstance(prompts, list) or not prompts or not all(isinstance(p, str) and p.strip() for p in prompts):
        raise InputError(f"{path}: prompts must be a list of texts, at least one and none of them empty")
    return PromptSet(name, about, tuple(f"{document}\n{prompt}" if document else prompt for prompt in prompts))
