"""What a loaded model is made of, found by watching one forward build its graph. Nothing is computed, no weight is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import mlx.core as mx

from dspark.buffers.leaves import is_recurrent
from dspark.models.hooks import AbstractWatch, Hooks, watching
from dspark.models.recurrence import FUNCTIONS, WINDOW_CLASSES


@attrs.frozen
class Anatomy:
    """Parts of a target.

    layers: instances in the order of the list; steps: for each layer call of a forward, which instance; one_stream: whether
    a layer gives one hidden state a token [B, W, D] and not several streams; trunk: the module
    whose result the head takes, or None, and how long a tuple it gives (0: none); embedding: the token table's module; head: the
    vocabulary projection's module, None where it is tied; owners: for each recurrent cache (its place in `all_leaves`
    order), the module that is handed it; windows: convolutions inside the owners; width: hidden size at the layers.
    """

    layers: tuple[Any, ...]
    steps: tuple[int, ...]
    one_stream: bool
    trunk: Any
    trunk_gives_tuple: int
    embedding: Any
    head: Any
    owners: tuple[Any, ...]
    windows: tuple[Any, ...]
    vocab_size: int
    width: int


@attrs.define(eq=False)
class _Event:
    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parent: _Event | None
    out: Any = None
    children: list[_Event] = attrs.field(factory=list)

    def size(self) -> int:
        return 1 + sum(child.size() for child in self.children)

    def takes(self, cache: Any) -> bool:
        values = (*self.args, *self.kwargs.values())
        return any(v is cache or any(m is cache for m in getattr(v, "caches", ())) for v in values)


class _Scout(AbstractWatch):
    def __init__(self) -> None:
        self.events: list[_Event] = []
        self._open: _Event | None = None

    def called(self, module: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        event = _Event(module, args, kwargs, self._open)
        if self._open is not None:
            self._open.children.append(event)
        self.events.append(event)
        self._open = event
        try:
            event.out = call(module, *args, **kwargs)
        finally:
            self._open = event.parent
        return event.out


def study(model: Any, layers: Sequence[Any], caches: Sequence[Any], leaves: Sequence[Any]) -> Anatomy:
    """Watch `model(ids, cache=caches)` build its graph. `leaves`: the caches one by one. `caches` must not be used again."""
    scout, hooks = _Scout(), Hooks()
    hooks.add((module for _, module in model.named_modules()), FUNCTIONS)
    try:
        with watching(scout):
            out = model(mx.array([[0, 1, 0]]), cache=caches)
    finally:
        hooks.close()
    logits = getattr(out, "logits", out)
    root = scout.events[0]
    index = {id(layer): i for i, layer in enumerate(layers)}
    ran = [event for event in scout.events if id(event.module) in index]
    trunk = _trunk(root, logits)
    embedding = next((e for e in scout.events if _is_lookup(e)), None)
    owners = [_owner(trunk or root, leaf) for leaf in leaves if is_recurrent(leaf)]
    inside = {id(m): m for owner in owners if owner is not None for m in _windows(owner)}
    width = _width(ran, embedding)
    normed = trunk or _last_norm(scout.events, ran, width, logits)
    return Anatomy(
        layers=tuple(layers),
        steps=tuple(index[id(e.module)] for e in ran),
        one_stream=all(_state(e.out).shape[:2] == (1, 3) and _state(e.out).ndim == 3 for e in ran),
        trunk=None if normed is None else normed.module,
        trunk_gives_tuple=len(normed.out) if normed is not None and isinstance(normed.out, tuple) else 0,
        embedding=None if embedding is None else embedding.module,
        head=_head(root, normed, logits),
        owners=tuple(owner for owner in owners),
        windows=tuple(inside.values()),
        vocab_size=logits.shape[-1],
        width=width,
    )


def _trunk(root: _Event, logits: mx.array) -> _Event | None:
    """The biggest part of the forward whose result is not the logits yet: what stands in front of the head."""
    event = root
    while event.children:
        event = max(event.children, key=_Event.size)
        out = event.out[0] if isinstance(event.out, tuple) and event.out else event.out
        if isinstance(out, mx.array) and out is not logits:
            return event if event.size() * 2 > root.size() else None
    return None


def _last_norm(events: Sequence[_Event], ran: Sequence[_Event], width: int, logits: mx.array) -> _Event | None:
    """Where one module runs layers and head: the last part behind the layers that gives a hidden state, called once."""
    if not ran:
        return None
    behind = events[events.index(ran[-1]) + ran[-1].size() :]
    states = [e for e in behind if isinstance(e.out, mx.array) and e.out.shape[-1] == width and e.out is not logits]
    if not states or sum(e.module is states[-1].module for e in events) > 1:
        return None
    return states[-1]


def _head(root: _Event, trunk: _Event | None, logits: mx.array) -> Any:
    """The module called behind the trunk that gives as many numbers as there are tokens."""
    if trunk is None or trunk.parent is None:
        return None
    behind = trunk.parent.children[trunk.parent.children.index(trunk) + 1 :]
    found = [e for e in behind if isinstance(e.out, mx.array) and e.out.shape[-1:] == logits.shape[-1:]]
    return found[0].module if found else None


def _is_lookup(event: _Event) -> bool:
    ids = event.args[0] if event.args else None
    return (
        not event.children
        and isinstance(ids, mx.array)
        and mx.issubdtype(ids.dtype, mx.integer)
        and isinstance(event.out, mx.array)
        and mx.issubdtype(event.out.dtype, mx.floating)
        and event.out.ndim == ids.ndim + 1
    )


def _owner(trunk: _Event, leaf: Any) -> Any:
    """The outermost module below the trunk that is handed `leaf`."""
    queue = list(trunk.children)
    while queue:
        event = queue.pop(0)
        if event.takes(leaf):
            return event.module
        queue.extend(event.children)
    return None


def _windows(owner: Any) -> list[Any]:
    return [m for _, m in owner.named_modules() if any(k.__name__ in WINDOW_CLASSES for k in type(m).__mro__)]


def _state(out: Any) -> mx.array:
    """A layer's hidden state, which some hand on together with more."""
    return _state(out[0]) if isinstance(out, tuple | list) else out


def _width(ran: Sequence[_Event], embedding: _Event | None) -> int:
    if ran:
        return _state(ran[0].out).shape[-1]
    return 0 if embedding is None else embedding.out.shape[-1]
