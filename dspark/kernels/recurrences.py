"""Another way to compute the gated delta recurrences of one model: chosen module instances, for as long as a handle is open.

mlx-lm's and mlx-vlm's `gated_delta_update` has a kernel for Metal; elsewhere it calls a loop over rows, or a scan over chunks.
An instance gets a subclass of its own class in whose methods that call means ours. Gates, options and defaults stay the
library's own code, and so does everything that ours is not for.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from dspark.kernels import gated
from dspark.kernels.gated import Gated
from dspark.models.hooks import active, class_below, methods, put_below, rebound, subclass

UPDATE = "gated_delta_update"
# What it calls where it has no kernel: q, k, v, g, beta, the state before, a mask; then what ours is not for.
LOOPS = ("gated_delta_ops", "gated_delta_chunked")

# Whether the kernel computes a shape.
Serves = Callable[[Gated], bool]


class Recurrences:
    """The instances of one model whose recurrences the kernel computes where `serves` says so, asked once a shape. `close`
    gives their classes back; safe to call twice. Of two open handles that hold a module, either may say so."""

    def __init__(self, model: Any, serves: Serves):
        self.serves = functools.lru_cache(None)(lambda kind: serves(kind) and gated.why_not(kind) is None)
        self.modules = [m for _, m in model.named_modules() if _calls(m)]
        with _lock:
            _open.append(self)
            for module in self.modules:
                _hold(module)

    def close(self) -> None:
        with _lock:
            if self in _open:
                _open.remove(self)
                for module in self.modules:
                    _release(module)
            self.modules = []

    def __enter__(self) -> Recurrences:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


# ---- instances ----------------------------------------------------------------------------------------------------------

_lock = threading.RLock()
_open: list[Recurrences] = []
# By instance: the module, which keeps its id from being given again, its class, and how many handles hold it.
_held: dict[int, tuple[Any, type, int]] = {}
_classes: dict[type, type] = {}


def _calls(module: Any) -> bool:
    klass = _held[id(module)][1] if id(module) in _held else class_below(module)
    return bool(_twins(klass))


def _hold(module: Any) -> None:
    _, original, owners = _held.get(id(module), (module, class_below(module), 0))
    if owners == 0:
        if original not in _classes:
            _classes[original] = subclass(original, original, _twins(original))
        put_below(module, _classes[original])
    _held[id(module)] = module, original, owners + 1


def _release(module: Any) -> None:
    _, original, owners = _held[id(module)]
    if owners > 1:
        _held[id(module)] = module, original, owners - 1
        return
    del _held[id(module)]
    put_below(module, original)


@functools.lru_cache(None)
def _twins(klass: type) -> dict[str, Any]:
    """The methods of a class that call the update, with ours in its place; none where ours would change nothing."""
    found = {}
    for name, method in methods(klass).items():
        update = method.__globals__.get(UPDATE) if UPDATE in method.__code__.co_names else None
        if isinstance(update, types.FunctionType) and any(loop in update.__globals__ for loop in LOOPS):
            found[name] = rebound(method, {UPDATE: _update(update)})
    return found


@functools.lru_cache(None)
def _update(function: types.FunctionType) -> Callable[..., Any]:
    names = {loop: _loop(function.__globals__[loop]) for loop in LOOPS if loop in function.__globals__}
    twin = rebound(function, names)
    # Some call themselves.
    twin.__globals__[UPDATE] = twin

    @functools.wraps(function)
    def update(*args: Any, **kwargs: Any) -> Any:
        # A module in training asks for what can be differentiated.
        return (twin if kwargs.get("use_kernel", True) else function)(*args, **kwargs)

    return update


def _loop(function: Callable[..., Any]) -> Callable[..., Any]:
    def loop(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
        *more: Any,
        **options: Any,
    ) -> Any:
        kind = gated.kind_of(q, v, g, beta)
        if state is None or any(value is not None for value in more) or options:
            return function(q, k, v, g, beta, state, mask, *more, **options)
        if not any(handle.serves(kind) for handle in _open) or not gated.fits(kind, k, v, state, mask):
            return function(q, k, v, g, beta, state, mask, *more)
        y, behind = gated.update(kind, q, k, v, g, beta, state, mask)
        if (watch := active()) is not None:

            def earlier(keep: Sequence[int]) -> mx.array:
                return gated.state_behind(kind, k, v, g, beta, state, mask, keep)

            watch.resumable(behind, earlier)
        return y, behind

    return loop


# ---- shapes -------------------------------------------------------------------------------------------------------------


def kinds(model: Any) -> list[Gated]:
    """The shapes of a model's recurrences, found by building a small forward's graph; nothing is computed."""
    found: list[Gated] = []

    def note(kind: Gated) -> bool:
        found.append(kind)
        return False

    with Recurrences(model, note) as handle:
        if handle.modules:
            model(mx.array([[0, 1, 0]]), cache=model.make_cache() if hasattr(model, "make_cache") else None)
    return list(dict.fromkeys(found))
