"""Prefill: put all of a prompt but its last token into the caches; that last token is the first anchor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import mlx.core as mx

from dspark.errors import InputError
from dspark.records import Settled, Tokens
from dspark.stages.base import AbstractStage

# Scores of a head that a piece of a prompt may hold: 64 MB in 16 bits.
MOST_SCORES = 1 << 25
FEWEST_ROWS = 128


def positive(instance: Any, attribute: Any, value: int) -> None:
    """attrs validator: at least 1."""
    if value < 1:
        raise InputError(f"{attribute.name} is {value}; it must be at least 1")


def rows_for(chunk: int, held: int) -> int:
    """Rows of the next piece behind `held` tokens: the chunk, halved while attention's scores would be too many.

    Metal never holds them. MLX's other attention does, rows x keys for each head, so a long context is read in shorter pieces.
    """
    rows = chunk
    while rows > FEWEST_ROWS and rows * (held + rows) > MOST_SCORES and not mx.metal.is_available():
        rows //= 2
    return rows


@attrs.frozen
class Prefill(AbstractStage):
    """Feed a prompt in pieces of `chunk` tokens.

    One row at a time: batches are put together from prefilled rows. Gives a `Settled` a chunk, so that a drafter absorbs
    taps as they come and none is kept longer; the last one opens the first round. Only the caches and taps are computed,
    the vocabulary projection never runs.
    """

    chunk: int = attrs.field(default=2048, validator=positive)

    def __call__(
        self,
        target: Any,
        buffers: Any,
        prompt: Tokens,
        known: int = 0,
        target_layer_ids: tuple[int, ...] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[Settled]:
        """Yield a record a chunk, from what `buffers` hold of `prompt` on. `known`: leading tokens that the stages have been
        told already. `progress(done, total)` is called after each chunk; what it raises stops the prefill."""
        total, at = len(prompt), buffers.held[0]
        if at == total - 1:
            yield Settled(mx.array([[prompt[-1]]]), (prompt[min(known, at) :],), None, (0,), (at,))
        while at < total - 1:
            end = min(at + rows_for(self.chunk, at), total - 1)
            _, taps = buffers.forward(target, mx.array([prompt[at:end]]), target_layer_ids)
            buffers.settle((end - at,), (prompt[at:end],))
            mx.eval(buffers.state, *(() if taps is None else (taps,)))
            mx.clear_cache()
            yield Settled(mx.array([[prompt[end]]]), (prompt[known : end + 1],), taps, (end - at,), (end,))
            at, known = end, end + 1
            if progress is not None:
                progress(at, total)
