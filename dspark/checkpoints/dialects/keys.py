"""Read a config's keys with their types checked: a wrong one ends in a sentence that names file, key, value and remedy."""

from __future__ import annotations

import math
from typing import Any

from dspark.errors import CheckpointError, did_you_mean

REMEDY = "restore the published file"
_MISSING: Any = object()


class Keys:
    """Sections of a config in the order they are looked up; a key set to null counts as absent."""

    def __init__(self, file: str, *sections: tuple[str, Any]):
        self.file = file
        self.sections: list[tuple[str, dict[str, Any]]] = []
        for prefix, section in sections:
            if section is None:
                continue
            if not isinstance(section, dict):
                raise CheckpointError(f"{file}: {prefix} is {_shown(section)}, not a table; {REMEDY}")
            self.sections.append((f"{prefix}." if prefix else "", section))

    def sub(self, name: str) -> Keys:
        """A table inside, alone."""
        path, value = self._find(name)
        return Keys(self.file, (path, value))

    def has(self, name: str) -> bool:
        return self._find(name)[1] is not None

    def whole(self, name: str, default: Any = _MISSING, low: int = 1, high: int = 1 << 24) -> Any:
        """A whole number within bounds."""
        path, value = self._or(name, default)
        if value is default:
            return value
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(path, value, f"a whole number from {low} to {high}")
        return value

    def real(self, name: str, default: Any = _MISSING, low: float = 0.0, high: float = 1e12) -> Any:
        """A finite number within bounds, `low` excluded."""
        path, value = self._or(name, default)
        if value is default:
            return value
        if type(value) not in (int, float) or not math.isfinite(value) or not low < value <= high:
            raise self._wrong(path, value, f"a number above {low:g} and up to {high:g}")
        return float(value)

    def flag(self, name: str, default: Any = _MISSING) -> Any:
        path, value = self._or(name, default)
        if value is default:
            return value
        if type(value) is not bool:
            raise self._wrong(path, value, "true or false")
        return value

    def text(self, name: str, default: Any = _MISSING, allowed: tuple[str, ...] = ()) -> Any:
        path, value = self._or(name, default)
        if value is default:
            return value
        if not isinstance(value, str) or (allowed and value not in allowed):
            hint = did_you_mean(value, allowed) if isinstance(value, str) else ""
            raise self._wrong(path, value, f"one of {', '.join(allowed)}" if allowed else "a text", hint)
        return value

    def wholes(self, name: str, default: Any = _MISSING, low: int = 0, high: int = 1 << 24) -> Any:
        """A list of whole numbers, as a tuple."""
        path, value = self._or(name, default)
        if value is default:
            return value
        if not isinstance(value, list) or not all(type(v) is int and low <= v <= high for v in value):
            raise self._wrong(path, value, f"a list of whole numbers from {low} to {high}")
        return tuple(value)

    def reals(self, name: str, default: Any = _MISSING) -> Any:
        """A list of finite numbers above zero, as a tuple."""
        path, value = self._or(name, default)
        if value is default:
            return value
        good = isinstance(value, list) and all(type(v) in (int, float) and math.isfinite(v) and v > 0 for v in value)
        if not good:
            raise self._wrong(path, value, "a list of numbers above 0")
        return tuple(float(v) for v in value)

    def texts(self, name: str, default: Any = _MISSING) -> Any:
        path, value = self._or(name, default)
        if value is default:
            return value
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self._wrong(path, value, "a list of texts")
        return tuple(value)

    def refuse(self, name: str, reason: str) -> CheckpointError:
        """The error for a key that is well formed but cannot be served."""
        path, value = self._find(name)
        return CheckpointError(f"{self.file}: {path} is {_shown(value)}; {reason}")

    def _find(self, name: str) -> tuple[str, Any]:
        for prefix, section in self.sections:
            if section.get(name) is not None:
                return prefix + name, section[name]
        return (self.sections[0][0] if self.sections else "") + name, None

    def _or(self, name: str, default: Any) -> tuple[str, Any]:
        path, value = self._find(name)
        if value is not None:
            return path, value
        if default is _MISSING:
            raise CheckpointError(f"{self.file}: {name} is missing; {REMEDY}")
        return path, default

    def _wrong(self, path: str, value: Any, wanted: str, hint: str = "") -> CheckpointError:
        return CheckpointError(f"{self.file}: {path} is {_shown(value)}, but must be {wanted}{hint}; {REMEDY}")


def _shown(value: Any) -> str:
    """A value for a message, short whatever it is."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
