"""Watching a model from outside: chosen module instances get a subclass of their own class that reports calls.

Nothing else about a module changes: parameters, names, `isinstance`, attributes, saving, deep copies. The subclass adds no
fields; with no watch active on the thread, the module's own call runs. Several owners may hook one instance, the last one
to let go puts its class back.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx

_local = threading.local()
_lock = threading.RLock()
_classes: dict[tuple[str, type, frozenset[str]], type | None] = {}
# By instance: the module, which keeps its id from being given again, its own class, how many hold it, what they hear of.
_hooked: dict[int, tuple[Any, type, int, frozenset[str]]] = {}


class AbstractWatch:
    """What happens while a forward is watched on this thread."""

    def called(self, module: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A hooked module is called; returns what the caller gets."""
        return call(module, *args, **kwargs)

    def computed(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """One of the functions or methods named when hooking was called by a hooked module and gave `out`."""

    def resumable(self, state: mx.array, behind: Callable[[Sequence[int]], mx.array]) -> None:
        """A recurrence gave `state` behind all rows of a block, and can give it behind the first `keep` of each batch row."""


def active() -> AbstractWatch | None:
    """The watch that sees this thread's calls."""
    return getattr(_local, "watch", None)


@contextmanager
def watching(watch: AbstractWatch) -> Iterator[None]:
    """Let `watch` see the hooked calls of this thread. The watch that was active before sees nothing meanwhile."""
    before = getattr(_local, "watch", None)
    _local.watch = watch
    try:
        yield
    finally:
        _local.watch = before


class Hooks:
    """The instances that one owner hooked. `close` gives their classes back; safe to call twice."""

    def __init__(self) -> None:
        self._held: list[int] = []

    def add(self, modules: Iterable[Any], functions: frozenset[str] = frozenset()) -> None:
        """Report calls of these modules, and of the functions and methods named when their methods call them."""
        with _lock:
            for module in modules:
                if id(module) not in self._held:
                    _hold(module, functions)
                    self._held.append(id(module))

    def close(self) -> None:
        with _lock:
            for key in self._held:
                _release(key)
            self._held.clear()


def original_class(module: Any) -> type:
    """The class that a module had before anything of ours."""
    found = type(module)
    while "_dspark_original" in vars(found):
        found = found._dspark_original  # type: ignore[attr-defined]
    return found


def class_below(module: Any) -> type:
    """The class of a module below its hooks."""
    return _hooked[id(module)][1] if id(module) in _hooked else type(module)


def put_below(module: Any, below: type) -> None:
    """Give a module another class, below its hooks if it has some: they stay, and will leave this class behind."""
    with _lock:
        if id(module) not in _hooked:
            module.__class__ = below
            return
        _, _, owners, functions = _hooked[id(module)]
        _hooked[id(module)] = (module, below, owners, functions)
        module.__class__ = _reporting(_recording(below, functions) or below, below)


def names_any(module: Any, functions: frozenset[str]) -> bool:
    """Whether a module's methods name one of these functions, or are one."""
    return _recording(original_class(module), functions) is not None


def _hold(module: Any, functions: frozenset[str]) -> None:
    _, original, owners, heard = _hooked.get(id(module), (module, type(module), 0, functions))
    if owners == 0:
        base = _recording(original, functions) or original
        module.__class__ = _reporting(base, original)
    _hooked[id(module)] = (module, original, owners + 1, heard)


def _release(key: int) -> None:
    module, original, owners, heard = _hooked[key]
    if owners > 1:
        _hooked[key] = (module, original, owners - 1, heard)
        return
    del _hooked[key]
    module.__class__ = original


def subclass(base: type, original: type, body: dict[str, Any]) -> type:
    """A subclass that passes for `original`, in names, copies and pickles; it adds no fields."""
    names = {
        "__slots__": (),
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__reduce_ex__": _plain_reduce,
        "_dspark_original": original,
    }
    return type(original.__name__, (base,), {**names, **body})


def _plain_reduce(self: Any, protocol: int) -> Any:
    """Copies and pickles have the original class."""
    made: list[Any] = list(object.__reduce_ex__(self, protocol))
    if len(made) > 1 and made[1] and made[1][0] is type(self):
        made[1] = (original_class(self), *made[1][1:])
    return tuple(made)


def _reporting(base: type, original: type) -> type:
    key = ("report", base, frozenset())
    if key not in _classes:

        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            watch = getattr(_local, "watch", None)
            if watch is None:
                return base.__call__(self, *args, **kwargs)
            return watch.called(self, base.__call__, args, kwargs)

        _classes[key] = subclass(base, original, {"__call__": __call__})
    return _classes[key]  # type: ignore[return-value]


def _recording(original: type, functions: frozenset[str]) -> type | None:
    """A subclass whose methods see reporting versions of the functions that they name, None where they name none."""
    key = ("record", original, functions)
    if key not in _classes:
        body = {
            name: twin for name, method in methods(original).items() if (twin := _with_reports(name, method, functions))
        }
        _classes[key] = subclass(original, original, body) if body else None
    return _classes[key]


def methods(klass: type) -> dict[str, types.FunctionType]:
    """The methods that instances of a class have, inherited ones included."""
    found: dict[str, types.FunctionType] = {}
    for base in klass.__mro__:
        for name, method in vars(base).items():
            if isinstance(method, types.FunctionType):
                found.setdefault(name, method)
    return found


def _with_reports(name: str, method: types.FunctionType, functions: frozenset[str]) -> Any:
    """The method reporting the functions that it names, and itself where it is one of them; None where neither holds."""
    found = functions.intersection(method.__code__.co_names).intersection(method.__globals__)
    twin = rebound(method, {f: _reported(f, method.__globals__[f]) for f in found}) if found else None
    return _reported(name, twin or method) if name in functions else twin


def rebound(method: types.FunctionType, names: dict[str, Any]) -> types.FunctionType:
    """The same code with some global names meaning something else; the module itself is left alone."""
    twin = types.FunctionType(
        method.__code__, {**method.__globals__, **names}, method.__name__, method.__defaults__, method.__closure__
    )
    twin.__kwdefaults__ = method.__kwdefaults__
    return twin


def _reported(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        watch = getattr(_local, "watch", None)
        if watch is not None:
            watch.computed(name, function, args, kwargs, out)
        return out

    return call
