"""The host cost of a round: Python outside MLX calls, in iterations of an empty loop.

Counted is the driver: session, send, land, verify, buffers, transcript, counts and records. Not counted are MLX, the target,
the drafter, accept and the detokenizer: their places hold stand-ins that give out what they made before, MLX calls are
replaced by functions that do nothing, and what all of these cost by themselves is measured in turn and taken off. Nobody
watches the session, as in a run without a live view. Run: python -m benchmarks.round
"""

from __future__ import annotations

import time
from typing import Any

import attrs
import mlx.core as mx
from mlx_lm.models.cache import KVCache

import dspark.round
from dspark.engine import TokenText, bind
from dspark.pipeline import chain
from dspark.records import Acceptance, Proposal, Settled
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


def nothing(*arrays: Any, axis: int = 0) -> mx.array:
    """Stands in for an MLX call."""
    return READY_IDS


def measure(rounds: int = 60, repeats: int = 400) -> tuple[float, float]:
    """(CPU seconds a round, of an empty loop iteration), each the least of `repeats` in turn: a busy machine only adds."""
    pipe = chain(Prefill(), ReadyDraft(), Verify(), Greedy(), KvTrim(), cap=CAP)
    engine = bind(pipe, ReadyTarget())
    accepted, following = mx.array([2]), mx.array([3])
    kept = [[1, 2, 0, 0]]
    stubs = {
        (dspark.round.mx, "async_eval"): nothing,
        (dspark.round.mx, "concatenate"): nothing,
        (dspark.round.mx, "expand_dims"): nothing,
        (dspark.round, "read"): lambda acceptance: ([2], [3], kept, None),
        (Greedy, "__call__"): lambda self, verdict, carry: (Acceptance(verdict, accepted, following), carry),
    }
    saved = {place: getattr(*place) for place in stubs}
    whole_s, stand_ins_s, empty_s, loop_s = [], [], [], []
    try:
        for (owner, name), stub in stubs.items():
            setattr(owner, name, stub)
        stand_ins = _stand_ins(engine)
        session = engine.open([1, 2, 3], max_tokens=10**9)
        session.step()
        for _ in range(repeats):
            whole_s.append(_timed(session.step, rounds))
            stand_ins_s.append(_timed(stand_ins, rounds))
            empty_s.append(_timed(lambda: None, rounds))
            began = time.thread_time()
            for _ in range(rounds * 40):
                pass
            loop_s.append((time.thread_time() - began) / (rounds * 40))
    finally:
        for (owner, name), original in saved.items():
            setattr(owner, name, original)
    return min(whole_s) - min(stand_ins_s) + min(empty_s), min(loop_s)


def _stand_ins(engine: Any) -> Any:
    """Everything that a round calls and that is not the driver, as often as a round does."""
    caches, text = engine.target.make_caches(), TokenText()
    settled = Settled(READY_IDS, ((0,),), None, (1,), (1,))

    def call() -> None:
        engine.pipeline.draft(settled, None, CAP)
        mx.concatenate([READY_IDS, READY_IDS], axis=1)
        _ = READY_IDS.size, READY_IDS.shape
        engine.target(READY_IDS, caches, ())
        engine.pipeline.accept(None, None)
        mx.async_eval(READY_IDS, READY_IDS, READY_IDS, None)
        dspark.round.read(None)
        for token in (1, 2, 3):
            text.add_token(token)
        _ = text.last_segment
        mx.expand_dims(READY_IDS, 1)

    return call


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
