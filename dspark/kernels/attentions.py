"""Another way to compute the attention of one model, or of a drafter: chosen module instances, for as long as a handle is open.

mlx-lm's and mlx-vlm's layers call `scaled_dot_product_attention` of their own libraries, and so do our drafters' with one of that
name; in the instances held here that call means ours. Quantised caches, array masks and all that ours is not for go on to theirs.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx

from dspark.kernels.attention import Attention, Call, kind_of
from dspark.kernels.linears import MOST_ROWS
from dspark.kernels.rebinding import Rebinding

ATTEND = "scaled_dot_product_attention"

# The way for a shape, None for MLX's own; asked once a shape.
Find = Callable[[Attention], Call | None]


class Attentions(Rebinding):
    """The instances whose attention of 2 to MOST_ROWS rows `find` may compute. `close` gives their classes back; safe to call
    twice. Of several open handles the first one that finds a way counts."""

    def __init__(self, modules: Iterable[Any], find: Find):
        self.find = functools.lru_cache(None)(find)
        super().__init__(_names, modules, _open)


_open: list[Attentions] = []


def _names(method: types.FunctionType) -> dict[str, Any]:
    """Ours in place of the attention that a method calls."""
    attend = method.__globals__.get(ATTEND) if ATTEND in method.__code__.co_names else None
    return {ATTEND: _attend(attend)} if isinstance(attend, types.FunctionType) else {}


@functools.lru_cache(None)
def _attend(function: types.FunctionType) -> Callable[..., Any]:
    def attend(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any = None,
        scale: float = 1.0,
        mask: Any = None,
        sinks: mx.array | None = None,
        **options: Any,
    ) -> Any:
        if not options and 1 < queries.shape[2] <= MOST_ROWS and isinstance(keys, mx.array):  # not a quantised cache
            kind = kind_of(queries, keys, values, mask)
            way = next((w for h in _open if (w := h.find(kind)) is not None), None) if kind is not None else None
            made = None if way is None else way(queries, keys, values, scale, sinks, cache)
            if made is not None:
                return made
        return function(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks, **options)

    return attend


# ---- shapes -------------------------------------------------------------------------------------------------------------


def kinds(model: Any, rows: int) -> list[Attention]:
    """The shapes of a model's attention in a forward of `rows` rows, found by building its graph; nothing is computed."""
    found: list[Attention] = []

    def note(kind: Attention) -> None:
        found.append(kind)

    with Attentions([m for _, m in model.named_modules()], note) as handle:
        if handle.modules:
            # A model that is called in another way keeps MLX's attention.
            with contextlib.suppress(Exception):
                model(mx.array([[0] * rows]), cache=model.make_cache() if hasattr(model, "make_cache") else None)
    return list(dict.fromkeys(found))
