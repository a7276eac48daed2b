"""The arms that run in this process: the recipe, the target alone through the same rounds, and mlx_lm on the same model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import attrs
import mlx.core as mx

from dspark.bench.record import Delivery, Run
from dspark.caps import FixedCap
from dspark.engine import Engine
from dspark.stages.accept import Sampling
from dspark.stages.draft import NoDraft


class Arm(Protocol):
    """Answers a prompt greedily and says how it went."""

    @property
    def name(self) -> str: ...

    @property
    def about(self) -> str:
        """What it is, with its version, in a few words."""
        ...

    def run(self, ids: tuple[int, ...], max_tokens: int) -> Run: ...

    def close(self) -> None: ...


@attrs.frozen
class SessionArm:
    """A session of an engine. spare_nbytes: memory that is loaded and no part of this arm."""

    name: str
    about: str
    engine: Engine
    spare_nbytes: int = 0

    def run(self, ids: tuple[int, ...], max_tokens: int) -> Run:
        return timed(lambda tell: self._answer(ids, max_tokens, tell), self.spare_nbytes)

    def _answer(self, ids: tuple[int, ...], max_tokens: int, tell: Callable[[int], None]) -> tuple[list[int], int]:
        tokens: list[int] = []
        with self.engine.open(ids, max_tokens=max_tokens) as session:
            for commit in session:
                tokens.extend(commit.tokens)
                tell(len(commit.tokens))
        return tokens, session.result.rounds

    def close(self) -> None: ...


@attrs.frozen
class MlxLmArm:
    """`mlx_lm.stream_generate` on the engine's own model object, with the same tokenizer, ids and quantised caches."""

    name: str
    about: str
    engine: Engine
    spare_nbytes: int = 0

    def run(self, ids: tuple[int, ...], max_tokens: int) -> Run:
        return timed(lambda tell: self._answer(ids, max_tokens, tell), self.spare_nbytes)

    def _answer(self, ids: tuple[int, ...], max_tokens: int, tell: Callable[[int], None]) -> tuple[list[int], int]:
        from mlx_lm import stream_generate

        kv, tokens = self.engine.kv, []
        how: dict[str, Any] = (
            {} if kv is None else {"kv_bits": kv.bits, "kv_group_size": kv.group_size, "quantized_kv_start": kv.start}
        )
        model, tokenizer = self.engine.target.model, self.engine.tokenizer
        for response in stream_generate(model, tokenizer, list(ids), max_tokens=max_tokens, **how):
            tokens.append(int(response.token))
            tell(1)
        return tokens, len(tokens)

    def close(self) -> None: ...


def timed(answer: Callable[[Callable[[int], None]], tuple[list[int], int | None]], spare_nbytes: int = 0) -> Run:
    """Run `answer`, which calls its argument with a count whenever tokens have come, and gives the tokens and rounds."""
    deliveries: list[Delivery] = []
    mx.reset_peak_memory()
    began = time.perf_counter()

    def tell(count: int) -> None:
        if count:
            deliveries.append((time.perf_counter() - began, count))

    tokens, rounds = answer(tell)
    took_s = time.perf_counter() - began
    return Run(tuple(tokens), tuple(deliveries), took_s, rounds, max(0, mx.get_peak_memory() - spare_nbytes))


def greedy(engine: Engine) -> Engine:
    """The same engine, choosing the likeliest token: the one way of decoding in which all arms must say the same."""
    return attrs.evolve(engine, sampling=Sampling(), accept_kind="auto")


def plain(engine: Engine) -> Engine:
    """The same target without a draft, through the same rounds."""
    return attrs.evolve(engine, pipeline=attrs.evolve(engine.pipeline, draft=NoDraft(), cap=FixedCap(0)))
