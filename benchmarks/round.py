"""The host cost of a round: Python outside MLX calls, in iterations of an empty loop.

Arrays are ready, the read is stubbed, the target and the stages hand out what they made before: what is left is the driver
itself (session, send, land, buffers, transcript, telemetry). Run: python -m benchmarks.round
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import attrs
import mlx.core as mx
from mlx_lm.models.cache import KVCache

import dspark.round
from dspark.engine import bind
from dspark.pipeline import chain
from dspark.records import Acceptance, Proposal
from dspark.stages.accept import Greedy
from dspark.stages.base import AbstractDraft
from dspark.stages.prefill import Prefill
from dspark.stages.rollback import KvTrim
from dspark.stages.verify import Verify

LAYERS, CAP, LIMIT = 32, 4, 500


class ReadyTarget:
    """Hands out the same logits again; its caches count tokens and hold nothing."""

    provides = frozenset({"logits"})
    name, context_length = "ready", None

    def __init__(self) -> None:
        self.logits = mx.zeros((1, CAP + 1, 8))
        mx.eval(self.logits)

    def make_caches(self) -> list[Any]:
        return [KVCache() for _ in range(LAYERS)]

    def __call__(self, ids: mx.array, caches: list[Any], target_layer_ids: tuple[int, ...] = ()) -> tuple[Any, None]:
        width = ids.shape[1]
        for cache in caches:
            cache.offset += width
        return self.logits, None


@attrs.frozen(eq=False)
class ReadyDraft(AbstractDraft):
    """Proposes the same tokens again."""

    tokens: mx.array = attrs.field(factory=lambda: mx.zeros((1, CAP), mx.int32))

    def init(self, opening: Any) -> tuple[None]:
        return (None,)

    def skip(self, settled: Any, carry: Any) -> Any:
        return carry

    def __call__(self, settled: Any, carry: Any, cap: int) -> tuple[Proposal, Any]:
        return Proposal(settled.anchor, self.tokens, (CAP,), None, ("ready",), settled.start), carry


def measure(rounds: int = 2000, repeats: int = 7) -> tuple[float, float]:
    """(CPU seconds a round, of an empty loop iteration), medians, measured in turn. What the stubs and the one slice of
    an MLX array cost by themselves is measured as well and taken off."""
    pipe = chain(Prefill(), ReadyDraft(), Verify(), Greedy(), KvTrim(), cap=CAP)
    engine = bind(pipe, ReadyTarget())
    accepted, following = mx.array([2]), mx.array([3])
    kept = [[1, 2, 0, 0]]
    stubs = {
        (dspark.round.mx, "async_eval"): lambda *arrays: None,
        (dspark.round.mx, "concatenate"): lambda arrays, axis=0: READY_IDS,
        (dspark.round, "_read"): lambda acceptance: ([2], [3], kept, None),
        (Greedy, "__call__"): lambda self, verdict, carry: (Acceptance(verdict, accepted, following), carry),
    }
    saved = {place: getattr(*place) for place in stubs}
    round_s, loop_s = [], []
    try:
        for (owner, name), stub in stubs.items():
            setattr(owner, name, stub)
        caches, accept = engine.target.make_caches(), engine.pipeline.accept

        def alone() -> None:
            engine.target(READY_IDS, caches, ())
            accept(None, None)
            following[:, None]
            _ = READY_IDS.shape

        for _ in range(repeats):
            session = engine.open([1, 2, 3], max_tokens=10**9)
            session.step()
            empty = _timed(lambda: None, rounds)
            round_s.append(_timed(session.step, rounds) - _timed(alone, rounds) + empty)
            began = time.thread_time()
            for _ in range(rounds * 500):
                pass
            loop_s.append((time.thread_time() - began) / (rounds * 500))
    finally:
        for (owner, name), original in saved.items():
            setattr(owner, name, original)
    return statistics.median(round_s), statistics.median(loop_s)


def _timed(call: Any, times: int) -> float:
    began = time.thread_time()
    for _ in range(times):
        call()
    return (time.thread_time() - began) / times


READY_IDS = mx.zeros((1, CAP + 1), mx.int32)


def main() -> None:
    mx.set_default_device(mx.cpu)
    round_s, loop_s = measure()
    print(
        f"host cost of a round: {round_s * 1e6:.1f} us = {round_s / loop_s:.0f} iterations of an empty loop"
        f" (limit {LIMIT}; {LAYERS} layers, {CAP} drafts, 2 accepted)"
    )


if __name__ == "__main__":
    main()
