"""Functions that chosen module instances call by a global name, replaced for those instances for as long as somebody wants it.

An instance gets a subclass of its own class, below its hooks, in whose methods the names mean something else; the modules that
define the functions are left alone.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any, Self

from dspark.models.hooks import class_below, methods, put_below, rebound, subclass

# A method, to what its global names are to mean; empty where it calls nothing that is replaced.
Names = Callable[[types.FunctionType], dict[str, Any]]

_lock = threading.RLock()
# By instance: the module, which keeps its id from being given again, its class, and what its holders want, each as often as wanted.
_held: dict[int, tuple[Any, type, tuple[Names, ...]]] = {}


class Rebinding:
    """The instances in which one owner replaced functions. `close` gives their classes back; safe to call twice. among: where
    what stands in for a function finds the owners that are open."""

    def __init__(self, names: Names, modules: Iterable[Any], among: list[Any]):
        self.names, self._among = names, among
        self.modules = [m for m in modules if _body(_original(m), frozenset((names,)))]
        with _lock:
            for module in self.modules:
                _, original, wanted = _held.get(id(module), (module, _original(module), ()))
                _put(module, original, (*wanted, names))
        among.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self in self._among:
            self._among.remove(self)
        with _lock:
            for module in self.modules:
                _, original, wanted = _held[id(module)]
                at = wanted.index(self.names)
                _put(module, original, wanted[:at] + wanted[at + 1 :])
            self.modules = []


def _original(module: Any) -> type:
    return _held[id(module)][1] if id(module) in _held else class_below(module)


def _put(module: Any, original: type, wanted: tuple[Names, ...]) -> None:
    if wanted:
        _held[id(module)] = module, original, wanted
        put_below(module, _swapped(original, frozenset(wanted)))
    else:
        del _held[id(module)]
        put_below(module, original)


@functools.lru_cache(None)
def _swapped(original: type, wanted: frozenset[Names]) -> type:
    return subclass(original, original, _body(original, wanted))


@functools.lru_cache(None)
def _body(original: type, wanted: frozenset[Names]) -> dict[str, Any]:
    """The methods that call something replaced, with what it is replaced by."""
    found = {}
    for name, method in methods(original).items():
        together: dict[str, Any] = {}
        for names in wanted:
            together |= names(method)
        if together:
            found[name] = rebound(method, together)
    return found
