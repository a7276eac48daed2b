"""The words that recipes use for stages: one table a role, filled by decorators. Extension points for other packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dspark.errors import ChainError

T = TypeVar("T", bound=type)

KINDS: dict[str, dict[str, type]] = {"draft": {}, "accept": {}, "rollback": {}, "cap": {}, "warp": {}}


def _register(role: str, kind: str) -> Callable[[T], T]:
    def decorate(cls: T) -> T:
        known = KINDS[role].setdefault(kind, cls)
        if known is not cls and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ChainError(
                f"{role} kind {kind!r} is taken by {known.__module__}.{known.__qualname__}; choose another word"
            )
        KINDS[role][kind] = cls
        return cls

    return decorate


def register_draft(kind: str) -> Callable[[T], T]:
    """Let recipes say `[draft] kind = "..."`; the class's fields become the table's keys."""
    return _register("draft", kind)


def register_accept(kind: str) -> Callable[[T], T]:
    """Let recipes say `[accept] kind = "..."`."""
    return _register("accept", kind)


def register_rollback(kind: str) -> Callable[[T], T]:
    """Let recipes say `[rollback] kind = "..."`."""
    return _register("rollback", kind)


def register_cap(kind: str) -> Callable[[T], T]:
    """Let recipes say `[cap] kind = "..."`."""
    return _register("cap", kind)


def register_warp(kind: str) -> Callable[[T], T]:
    """Let recipes name a link of the sampling chain."""
    return _register("warp", kind)


def kind_of(role: str, cls: type) -> str | None:
    """The word for a stage's class, or None where it has none."""
    return next((word for word, known in KINDS[role].items() if known is cls), None)
