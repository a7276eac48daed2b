"""Another way to compute the gated delta recurrences of one model: chosen module instances, for as long as a handle is open.

mlx-lm's and mlx-vlm's `gated_delta_update` has a kernel for Metal; elsewhere it calls a loop over rows, or a scan over chunks.
An instance gets a subclass of its own class in whose methods that call means ours. Gates, options and defaults stay the
library's own code, and so does everything that ours is not for.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from dspark.kernels import gated
from dspark.kernels.gated import Gated
from dspark.kernels.rebinding import Rebinding
from dspark.models.hooks import active, rebound

UPDATE = "gated_delta_update"
# What it calls where it has no kernel: q, k, v, g, beta, the state before, a mask; then what ours is not for.
LOOPS = ("gated_delta_ops", "gated_delta_chunked")

# Whether the kernel computes a shape.
Serves = Callable[[Gated], bool]


class Recurrences(Rebinding):
    """The instances of one model whose recurrences the kernel computes where `serves` says so, asked once a shape. `close`
    gives their classes back; safe to call twice. Of two open handles that hold a module, either may say so."""

    def __init__(self, model: Any, serves: Serves):
        self.serves = functools.lru_cache(None)(lambda kind: serves(kind) and gated.why_not(kind) is None)
        super().__init__(_names, [m for _, m in model.named_modules()], _open)


_open: list[Recurrences] = []


def _names(method: types.FunctionType) -> dict[str, Any]:
    """Ours in place of the update that a method calls; nothing where it would change nothing."""
    update = method.__globals__.get(UPDATE) if UPDATE in method.__code__.co_names else None
    if isinstance(update, types.FunctionType) and any(loop in update.__globals__ for loop in LOOPS):
        return {UPDATE: _update(update)}
    return {}


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
