"""Recurrence-replay: what a verify feeds to recurrences and convolutions is kept, so that a state can be rebuilt at any row.

A recurrent cache has slots. Each is explained, once per target, by what produced it: the state that a primitive returned
(run again over the kept rows from the state before the block), the state of a step that runs token by token (the kept
step's own), or a window of rows (cut again). Where a slot has no such explanation, the module that owns the cache runs
again on its kept input; lazy evaluation leaves out what the state does not need. No other module runs, and full acceptance
costs nothing.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import attrs
import mlx.core as mx

from dspark.buffers.leaves import caches_among, is_recurrent
from dspark.buffers.slots import join
from dspark.errors import DsparkError
from dspark.models.hooks import AbstractWatch


@attrs.frozen
class Primitive:
    """A recurrence that takes a block: `state` names the argument with the state before it, `timed` those with a time axis;
    `masks` says that it takes a mask [B, T] of the rows that count. Its second result is the state behind the block."""

    state: str
    timed: dict[str, int]
    masks: bool = False


PRIMITIVES = {
    "gated_delta_update": Primitive("state", {"q": 1, "k": 1, "v": 1, "a": 1, "b": 1}, masks=True),
    "ssm_update": Primitive("state", {"hidden_states": 1, "B": 1, "C": 1, "dt": 1}, masks=True),
    "recurrent_gla": Primitive("h", {"q": 2, "k": 2, "v": 2}),
    "rnn_scan": Primitive("h0", {"x": 1, "a": 1}),
    "_wkv7": Primitive("state", dict.fromkeys("rwkvab", 1)),
    "ssm_step": Primitive("state", {"x": 1}),
}
# Methods that convolve by hand: the argument whose last rows the cache keeps, and its time axis.
WINDOWS = {"_custom_convolution": ("u", 2)}
# Modules whose first argument is what a window is cut from, [B, rows, channels].
WINDOW_CLASSES = ("Conv1d", "TokenShift")
FUNCTIONS = frozenset(PRIMITIVES) | frozenset(WINDOWS)


class Call(NamedTuple):
    """A recorded call and what it gave."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


class Window(NamedTuple):
    """Rows that a cache may keep the last ones of, along `axis`."""

    rows: mx.array
    axis: int


@attrs.define
class Entry:
    """What one owner of a cache did in a forward."""

    module: Any
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    calls: list[Call] = attrs.field(factory=list)
    windows: list[Window] = attrs.field(factory=list)
    # By id of a state, which is kept so that its id stays its own: how the same recurrence gives it behind fewer rows.
    earlier: dict[int, tuple[mx.array, Callable[[Sequence[int]], mx.array]]] = attrs.field(factory=dict)


@attrs.frozen
class Replay:
    """How a recurrent cache is rebuilt: for each slot ("state" | "steps" | "window", number of the record), or `None` for
    the owner's whole call. `alone`: the owner holds no other cache, so that its call could be run again; `zero_start`: no
    state yet means the same as a state of zeros, so that rows without one can stand beside others; `masked`: the primitives
    were seen to honour a mask, so that rows with different counts go in one call."""

    slots: tuple[tuple[str, int], ...] | None
    alone: bool = True
    zero_start: bool = True
    masked: bool = False

    @property
    def detail(self) -> str:
        return "recurrence only" if self.slots is not None else "its module again"


class Tape(AbstractWatch):
    """The records of one forward of `width` rows, by cache. `owners`, `windows`: ids of the modules to listen to."""

    def __init__(self, width: int, owners: frozenset[int], windows: frozenset[int]):
        self.width, self._owners, self._windows = width, owners, windows
        self._entries: dict[int, Entry] = {}
        self._open: Entry | None = None

    def called(self, module: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = id(module)
        if self._open is None and key in self._owners:
            return self._owner(module, call, args, kwargs)
        if self._open is not None and key in self._windows:
            self._open.windows.append(Window(args[0] if args else kwargs["x"], 1))
        return call(module, *args, **kwargs)

    def _owner(self, module: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entry = Entry(module, call, args, kwargs)
        for leaf in recurrent_leaves((*args, *kwargs.values())):
            self._entries[id(leaf)] = entry
        self._open = entry
        try:
            return call(module, *args, **kwargs)
        finally:
            self._open = None

    def computed(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        if self._open is None:
            return
        if name in WINDOWS:
            argument, axis = WINDOWS[name]
            self._open.windows.append(Window(_bind(function, args, kwargs)[argument], axis))
        else:
            self._open.calls.append(Call(name, function, args, kwargs, out))

    def resumable(self, state: mx.array, behind: Callable[[Sequence[int]], mx.array]) -> None:
        if self._open is not None:
            self._open.earlier[id(state)] = state, behind

    def explain(self, cache: Any, before: Sequence[mx.array | None]) -> Replay | None:
        """What rebuilds `cache`, whose slots were `before`; None where this forward shows no way. Evaluates the slots."""
        entry = self._entries.get(id(cache))
        if entry is None:
            return None
        free, slots = list(range(len(entry.windows))), []
        alone = len(caches_among((*entry.args, *entry.kwargs.values()))) == 1
        for old, new in zip(before, cache.cache, strict=True):
            found = _explain_state(entry, old, new, self.width) or _explain_window(entry, old, new, self.width, free)
            if found is None:
                return Replay(None) if alone else None
            slots.append(found)
        states = [entry.calls[number] for kind, number in slots if kind == "state"]
        return Replay(tuple(slots), alone, masked=all(_honours_mask(call, self.width) for call in states))

    def rebuild(
        self, cache: Any, replay: Replay, before: Sequence[mx.array | None], keep: Sequence[int]
    ) -> list[mx.array | None]:
        """The slots of `cache` behind the first `keep` rows of each batch row, 0 <= keep <= width. Builds graph only."""
        if all(k == self.width for k in keep):
            return list(cache.cache)
        if not any(keep):
            return list(before)
        entry = self._entries.get(id(cache))
        if entry is None:
            raise DsparkError("a recurrent layer ran unrecorded, so it cannot be rolled back; was its target closed?")
        if replay.slots is None:
            return _by_rows(
                keep, self.width, before, cache.cache, lambda rows, k: _rerun(entry, cache, before, rows, k)
            )
        now = cache.cache
        return [
            _slot(entry, source, (before[i], now[i]), keep, self.width, replay.masked)
            for i, source in enumerate(replay.slots)
        ]


def recurrent_leaves(values: Sequence[Any]) -> list[Any]:
    """Caches among `values`, members of cache lists included, whose state is a list of slots."""
    return [leaf for leaf in caches_among(values) if is_recurrent(leaf)]


# ---- explaining ---------------------------------------------------------------------------------------------------------


def _explain_state(entry: Entry, old: mx.array | None, new: mx.array | None, width: int) -> tuple[str, int] | None:
    for i, call in enumerate(entry.calls):
        if not (isinstance(call.out, tuple) and len(call.out) > 1 and call.out[1] is new):
            continue
        same = [j for j, other in enumerate(entry.calls) if other.name == call.name]
        if len(same) == width and i == same[-1] and width > 1:
            return "steps", same[0]
        arguments = _bind(call.function, call.args, call.kwargs)
        # A primitive that fetches its state from the cache itself cannot be run again with another one.
        if arguments.get(PRIMITIVES[call.name].state) is old and not caches_among(tuple(arguments.values())):
            return "state", i
    return None


def _explain_window(
    entry: Entry, old: mx.array | None, new: mx.array | None, width: int, free: list[int]
) -> tuple[str, int] | None:
    if new is None:
        return None
    for j in free:
        cut = _cut_window(entry.windows[j], old, new, [width], width)
        if cut is not None and bool(mx.array_equal(cut, new).item()):
            free.remove(j)
            return "window", j
    return None


def _honours_mask(call: Call, width: int) -> bool:
    """Whether the primitive gives, for two rows with different counts, what it gives each of them without a mask."""
    primitive = PRIMITIVES[call.name]
    if not primitive.masks or width < 2:
        return False
    arguments = _bind(call.function, call.args, call.kwargs)
    for name, value in arguments.items():
        if (name in primitive.timed or name == primitive.state) and isinstance(value, mx.array):
            arguments[name] = mx.concatenate([value, value])
    twice = call._replace(args=(), kwargs=arguments)
    keep = [1, width]
    together = _masked(twice, primitive, keep)
    apart = mx.concatenate([_prefix(call, primitive, None, k) for k in keep])
    scale = mx.abs(apart.astype(mx.float32)).max()
    off = mx.abs(together.astype(mx.float32) - apart.astype(mx.float32)).max()
    return bool((off <= 1e-2 * scale).item())


# ---- rebuilding ---------------------------------------------------------------------------------------------------------


def _slot(
    entry: Entry,
    source: tuple[str, int],
    slot: tuple[mx.array | None, mx.array],
    keep: Sequence[int],
    width: int,
    masked: bool,
) -> mx.array | None:
    (kind, number), (old, new) = source, slot
    if kind == "window":
        return _cut_window(entry.windows[number], old, new, keep, width)
    if kind == "steps":
        states = [call.out[1] for call in entry.calls[number : number + width]]
        return _by_rows(keep, width, [old], [new], lambda rows, k: [_rows(states[k - 1], rows)])[0]
    call = entry.calls[number]
    if (known := entry.earlier.get(id(call.out[1]))) is not None:
        return known[1](keep)
    primitive = PRIMITIVES[call.name]
    if masked and len(set(keep)) > 1:
        return _masked(call, primitive, keep)
    return _by_rows(keep, width, [old], [new], lambda rows, k: [_prefix(call, primitive, rows, k)])[0]


def _cut_window(
    window: Window, old: mx.array | None, new: mx.array, keep: Sequence[int], width: int
) -> mx.array | None:
    """The last rows before `keep`; None where the shapes do not fit the slot."""
    rows, axis = window
    size = new.shape[axis] if axis < new.ndim else -1
    if rows.ndim != new.ndim or size < 0:
        return None
    if rows.shape[axis] == width and size > 0:
        shape = list(rows.shape)
        shape[axis] = size
        rows = mx.concatenate([mx.zeros(shape, rows.dtype) if old is None else old, rows], axis=axis)
    if rows.shape[axis] != width + size:
        return None
    if len(set(keep)) == 1:
        at = [slice(None)] * rows.ndim
        at[axis] = slice(keep[0], keep[0] + size)
        cut = mx.contiguous(rows[tuple(at)])
    else:
        at = mx.array(list(keep))[:, None] + mx.arange(size)
        lead = [1] * (axis - 1)
        cut = mx.take_along_axis(rows, at.reshape(len(keep), *lead, size, *[1] * (rows.ndim - axis - 1)), axis=axis)
    return cut if cut.shape == new.shape else None


def _bind(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, defaults left out."""
    names = _positional(function)
    return (
        {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) <= len(names)
        else _bound(function, args, kwargs)
    )


def _bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(_signature(function).bind(*args, **kwargs).arguments)


_signature = functools.lru_cache(maxsize=64)(inspect.signature)


@functools.lru_cache(maxsize=64)
def _positional(function: Callable[..., Any]) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in _signature(function).parameters.values() if p.kind in kinds)


def _prefix(call: Call, primitive: Primitive, rows: list[int] | None, keep: int) -> mx.array:
    """The state behind the first `keep` rows, for some batch rows (None for all)."""
    arguments = _bind(call.function, call.args, call.kwargs)
    batch = arguments[next(iter(primitive.timed))].shape[0]
    for name, value in arguments.items():
        if not isinstance(value, mx.array):
            continue
        if name in primitive.timed and value.ndim > primitive.timed[name]:
            value = _head(value, primitive.timed[name], keep)
        if (name in primitive.timed or name == primitive.state) and value.shape[0] == batch:
            value = _rows(value, rows)
        arguments[name] = value
    return call.function(**arguments)[1]


def _masked(call: Call, primitive: Primitive, keep: Sequence[int]) -> mx.array:
    """One call for rows that keep different counts: the count is a device array, and what lies behind it is masked."""
    arguments = _bind(call.function, call.args, call.kwargs)
    top, counts = max(keep), mx.array(list(keep))
    for name, axis in primitive.timed.items():
        if isinstance(arguments.get(name), mx.array):
            arguments[name] = _head(arguments[name], axis, top)
    arguments["mask"] = mx.arange(top)[None] < counts[:, None]
    if "lengths" in _signature(call.function).parameters:
        # A row that keeps nothing is told so by a negative length; zero would mean its first row.
        arguments["lengths"] = mx.where(counts > 0, counts, -1)
    return call.function(**arguments)[1]


def _rerun(
    entry: Entry, cache: Any, before: Sequence[mx.array | None], rows: list[int] | None, keep: int
) -> list[mx.array | None]:
    """Call the owner again on its first `keep` rows with the cache as it was."""
    stand_in = copy.copy(cache)
    stand_in.cache = [_rows(slot, rows) for slot in before]
    width = next(v.shape[-1] if _counts(v) else v.shape[1] for v in _arrays(entry))
    batch = next(v.shape[0] for v in _arrays(entry))

    def cut(value: Any) -> Any:
        if value is cache:
            return stand_in
        if isinstance(value, tuple | list) and type(value) in (tuple, list):
            return type(value)(cut(v) for v in value)
        if not isinstance(value, mx.array) or value.ndim == 0:
            return value
        axis = value.ndim - 1 if _counts(value) else 1
        if value.ndim > axis and value.ndim > 1 and value.shape[axis] == width:
            value = _head(value, axis, keep)
        return _rows(value, rows) if value.shape[0] == batch else value

    entry.call(entry.module, *[cut(v) for v in entry.args], **{k: cut(v) for k, v in entry.kwargs.items()})
    return stand_in.cache


def _arrays(entry: Entry) -> list[mx.array]:
    return [v for v in (*entry.args, *entry.kwargs.values()) if isinstance(v, mx.array) and v.ndim > 1]


def _counts(value: mx.array) -> bool:
    """Whether an array holds ids, positions or masks, whose time axis is the last one."""
    return not mx.issubdtype(value.dtype, mx.floating)


def _head(value: mx.array, axis: int, keep: int) -> mx.array:
    return value[(slice(None),) * axis + (slice(0, keep),)]


def _rows(value: Any, rows: list[int] | None) -> Any:
    return value if value is None or rows is None else value[mx.array(rows)]


def _by_rows(
    keep: Sequence[int],
    width: int,
    before: Sequence[mx.array | None],
    now: Sequence[mx.array | None],
    run: Callable[[list[int] | None, int], list[mx.array | None]],
) -> list[mx.array | None]:
    """Slots of a batch, put together from one `run(rows, k)` for each count k that some rows keep."""
    if len(set(keep)) == 1:
        return run(None, keep[0])
    order: list[int] = []
    parts: list[list[Any]] = []
    for k in sorted(set(keep)):
        rows = [r for r, n in enumerate(keep) if n == k]
        order.extend(rows)
        whole = now if k == width else before if k == 0 else None
        parts.append([_rows(slot, rows) for slot in whole] if whole is not None else run(rows, k))
    back = mx.array(sorted(range(len(order)), key=order.__getitem__))
    return [join([part[i] for part in parts])[back] for i in range(len(before))]
