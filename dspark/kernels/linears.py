"""Other kernels for the quantised linears of one model: chosen module instances, for as long as a handle is open.

An instance gets a subclass of its own class that looks up, by the shape of its input, how this product is done; where
nothing is found its own call runs. Parameters, names, `isinstance`, saving and copies stay as they are.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn

from dspark.models.hooks import original_class, subclass

# Linears of one parent that models call on the same input, one after the other.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Above so many rows MLX's own kernels read the weights once everywhere.
MOST_ROWS = 16
# From so many on they are a prefill's, or a wide batch's. No draft of one sequence is that long.
PREFILL_ROWS = 64


class Shape(NamedTuple):
    """What a way of multiplying is chosen for. `out`: rows of each matrix that shares x; `k`: their columns."""

    rows: int
    out: tuple[int, ...]
    k: int
    bits: int
    group: int
    dtype: mx.Dtype

    def __str__(self) -> str:
        rows, out = "1 row" if self.rows == 1 else f"{self.rows} rows", "+".join(map(str, self.out))
        return f"{rows}, {self.k} -> {out}, {self.bits} bits, group {self.group}, {str(self.dtype).removeprefix('mlx.core.')}"


# What stays of a shape for any rows: `out` and `k`, bits and group.
Matrix = tuple[tuple[int, ...], int, int, int]
# x [..., K] and modules with weight, scales and biases, to one product [..., N] a module.
Way = Callable[[mx.array, Sequence[Any]], list[mx.array]]
Find = Callable[[Shape], Way | None]


class Together:
    """Linears that are called on the same input: the first one's call computes all, the others find theirs."""

    def __init__(self, members: Sequence[Any]):
        self.members = tuple(members)
        self.out = tuple(rows_of(m) for m in members)
        self._made = threading.local()

    def take(self, module: Any, x: mx.array) -> mx.array | None:
        """What an earlier call on this thread made for this module from this very array; None where nothing was."""
        left = getattr(self._made, "left", None)
        if left is None or left[0] is not x:
            return None
        out = left[1].pop(id(module), None)
        if not left[1]:
            self._made.left = None
        return out

    def keep(self, x: mx.array, products: Sequence[mx.array]) -> mx.array:
        """Lay by what the other members will ask for; returns the first one's."""
        self._made.left = x, {id(m): y for m, y in zip(self.members[1:], products[1:], strict=True)}
        return products[0]


class Held(NamedTuple):
    """How a held instance multiplies. `together`: the set that it is the first of or belongs to, None where it is alone."""

    find: Callable[[mx.array, tuple[int, ...], Any], Way | None]
    together: Together | None
    out: tuple[int, ...]


class Linears:
    """The instances of one model whose products `find` may do. `close` gives their classes back; safe to call twice.

    find: the way for a `Shape`, None for the module's own; asked once a shape. worth: whether a matrix, or several that share x,
    has another way for any rows; instances without stay as they are, for looking up costs a microsecond a call. Of two handles
    on a model the first one's ways count until it is closed.
    """

    def __init__(
        self, model: Any, find: Find, fuse: bool = True, worth: Callable[[Matrix], bool] = lambda matrix: True
    ):
        known: dict[Any, Way | None] = {}

        def ask(x: mx.array, out: tuple[int, ...], module: Any) -> Way | None:
            key = (x.shape, x.dtype, out, module.bits, module.group_size)
            if key not in known:
                shape = Shape(math.prod(x.shape[:-1]), out, x.shape[-1], module.bits, module.group_size, x.dtype)
                counted = shape.rows <= MOST_ROWS or shape.rows >= PREFILL_ROWS
                fits = counted and module["scales"].dtype == x.dtype
                known[key] = find(shape) if fits else None
            return known[key]

        sets = {id(m): together for together in (siblings(model) if fuse else ()) for m in together.members}
        self.modules = [
            m
            for _, m in model.named_modules()
            if suits(m) and (worth(_matrix(m, (m,))) or (id(m) in sets and worth(_matrix(m, sets[id(m)].members))))
        ]
        with _lock:
            for module in self.modules:
                _hold(module, self, Held(ask, sets.get(id(module)), (rows_of(module),)))

    def close(self) -> None:
        with _lock:
            for module in self.modules:
                _release(module, self)
            self.modules = []

    def __enter__(self) -> Linears:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def suits(module: Any) -> bool:
    """Whether a module is a quantised linear of MLX's own class and affine mode, or an embedding that may serve as one.
    One that others hooked is left alone, for its calls would pass them by."""
    plain = type(module) in (nn.QuantizedLinear, nn.QuantizedEmbedding) or type(module) in _classes.values()
    return plain and module.mode == "affine"


def siblings(model: Any) -> Iterator[Together]:
    """The sets of linears that models call on one input: same columns, bits, groups and number format."""
    for _, parent in model.named_modules():
        for names in SIBLINGS:
            members = [parent.get(name) for name in names]
            if all(isinstance(m, nn.Module) and suits(m) for m in members) and len({_kind(m) for m in members}) == 1:
                yield Together(members)


def rows_of(module: Any) -> int:
    return module["weight"].shape[0]


def _matrix(first: Any, members: Sequence[Any]) -> Matrix:
    return tuple(map(rows_of, members)), first["scales"].shape[1] * first.group_size, first.bits, first.group_size


def _kind(module: Any) -> tuple[Any, ...]:
    scales = module["scales"]
    return original_class(module), module.bits, module.group_size, scales.shape[1], scales.dtype


# ---- instances ----------------------------------------------------------------------------------------------------------

_lock = threading.RLock()
# By instance: the module, which keeps its id from being given again, its class, and what its handles want.
_held: dict[int, tuple[Any, type, dict[int, Held]]] = {}
_classes: dict[type, type] = {}


def _hold(module: Any, owner: Linears, how: Held) -> None:
    if id(module) not in _held:
        _held[id(module)] = module, type(module), {}
        module.__class__ = _swapped(type(module))
    _held[id(module)][2][id(owner)] = how


def _release(module: Any, owner: Linears) -> None:
    _, original, owners = _held.get(id(module), (None, None, {}))
    owners.pop(id(owner), None)
    # Under another hook the class stays, and calls the module's own.
    if not owners and original is not None:
        del _held[id(module)]
        if type(module) is _classes.get(original):
            module.__class__ = original


def _swapped(original: type) -> type:
    """A subclass of a linear's class, or of an embedding's, that looks for another way to multiply."""
    if original not in _classes:
        name = "as_linear" if issubclass(original, nn.QuantizedEmbedding) else "__call__"
        own = getattr(original, name)

        def call(self: Any, x: mx.array) -> mx.array:
            held = _held.get(id(self))
            if held is None:
                return own(self, x)
            y = _product(self, x, next(iter(held[2].values())))
            if y is None:
                return own(self, x)
            return y + self["bias"] if "bias" in self else y

        _classes[original] = subclass(original, original, {name: call})
    return _classes[original]


def _product(module: Any, x: mx.array, how: Held) -> mx.array | None:
    together = how.together
    if together is not None:
        y = together.take(module, x)
        if y is None and module is together.members[0] and (way := how.find(x, together.out, module)) is not None:
            y = together.keep(x, way(x, together.members))
        if y is not None:
            return y
    way = how.find(x, how.out, module)
    return None if way is None else way(x, (module,))[0]
