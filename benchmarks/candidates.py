"""Ways to send a round that are tried and not (yet) in the package: `benchmarks.scripted --candidates` runs them in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

import dspark.models.target as target_module
import dspark.session as session_module
from dspark.models.hooks import AbstractWatch


class SentInPieces(AbstractWatch):
    """Sends every so many layers to the device while the host builds those behind them; passes all on to another watch."""

    def __init__(self, inner: Any, layers: frozenset[int], every: int):
        self._inner, self._layers, self._every, self._seen = inner, layers, every, 0

    def called(self, module: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self._inner.called(module, call, args, kwargs)
        if id(module) in self._layers:
            self._seen += 1
            if self._seen % self._every == 0:
                mx.async_eval(out)
        return out

    def computed(self, *args: Any) -> None:
        self._inner.computed(*args)


@contextlib.contextmanager
def layers_in_pieces(target: Any, every: int) -> Iterator[None]:
    """Forwards that are watched (those with taps) are sent in pieces of `every` layers."""
    own, layers = target_module.watching, frozenset(map(id, target.anatomy.layers))
    target_module.watching = lambda watch: own(
        SentInPieces(watch, layers, every) if type(watch).__name__ in ("Taps", "_Both") else watch
    )
    try:
        yield
    finally:
        target_module.watching = own


@contextlib.contextmanager
def draft_early() -> Iterator[None]:
    """Drafts are sent before the verify is built."""
    own = session_module.send

    class Early:
        def __init__(self, pipeline: Any):
            self._pipeline = pipeline

        def __getattr__(self, name: str) -> Any:
            return getattr(self._pipeline, name)

        @property
        def draft(self) -> Any:
            inner = self._pipeline.draft

            def draft(settled: Any, carry: Any, cap: int) -> Any:
                proposal, carry = inner(settled, carry, cap)
                mx.async_eval(proposal.tokens, inner.pending(carry))
                return proposal, carry

            draft.pending = inner.pending  # type: ignore[attr-defined]
            return draft

    def send(pipeline: Any, *args: Any) -> Any:
        return own(Early(pipeline), *args)

    session_module.send = send
    try:
        yield
    finally:
        session_module.send = own


@contextlib.contextmanager
def both(target: Any, every: int) -> Iterator[None]:
    with draft_early(), layers_in_pieces(target, every):
        yield


def candidates(target: Any) -> dict[str, Callable[[], Any]]:
    return {
        "as it is": contextlib.nullcontext,
        "drafts sent first": draft_early,
        "layers sent by 12": lambda: layers_in_pieces(target, 12),
        "layers sent by 6": lambda: layers_in_pieces(target, 6),
        "drafts first, layers by 12": lambda: both(target, 12),
    }
