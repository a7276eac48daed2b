"""Let a target write for many rows at once. All rows keep one cache length, so no family needs masks or paddings: where a
row's prompt is longer than its neighbours', its own tokens are fed instead of sampled ones until it ends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from dspark.buffers.leaves import all_leaves
from dspark.models.target import Target
from dspark.train.quick import compiled

CHECK_EVERY = 16
COMPACT_BELOW = 0.75
BISECTIONS = 12
# Nats below the likeliest token at which a nucleus may end.
DEEPEST = 24.0


class Written(NamedTuple):
    """What a row wrote, without its stop token, and whether it came to one."""

    tokens: list[int]
    finished: bool


class Manner(NamedTuple):
    """How rows are sampled. temperatures: one a row, 0 is greedy. top_p: 1 keeps all."""

    temperatures: np.ndarray
    top_p: float = 1.0


def write(
    target: Target,
    prompts: Sequence[Sequence[int]],
    manner: Manner,
    max_tokens: int,
    stops: Sequence[int],
    key: mx.array,
) -> list[Written]:
    """Continue every prompt by at most `max_tokens`, until one of `stops`. Deterministic for a key on one machine.

    Costs max_tokens + (longest - shortest prompt) forwards of one token a row; so sort prompts by length first. Rows that
    have stopped are taken out now and then where the caches allow it.
    """
    rows = _Rows(target, prompts, manner, max_tokens, stops)
    last = rows.forced.shape[1] + max_tokens
    token, position = rows.prefill(), rows.shortest
    block: list[mx.array] = []
    while position < last and rows.live.size:
        for _ in range(min(CHECK_EVERY, last - position)):
            key, noise = mx.random.split(key)
            token = rows.step(token, position, noise)
            mx.async_eval(token)
            block.append(token)
            position += 1
        rows.keep(mx.stack(block, axis=1), position - len(block))
        block = []
        token = rows.compact(token)
    return rows.written()


class _Rows:
    def __init__(self, target: Target, prompts: Sequence[Any], manner: Manner, max_tokens: int, stops: Sequence[int]):
        self.target, self.max_tokens = target, max_tokens
        self.lengths = np.array([len(p) for p in prompts])
        self.shortest = int(self.lengths.min())
        self.forced = np.full((len(prompts), int(self.lengths.max())), 0, np.int32)
        for row, prompt in zip(self.forced, prompts, strict=True):
            row[: len(prompt)] = prompt
        self.stops = np.array(sorted(stops))
        self.out = np.full((len(prompts), self.forced.shape[1] + max_tokens), -1, np.int64)
        self.live = np.arange(len(prompts))
        self.caches = target.make_caches()
        self.leaves = all_leaves(self.caches)
        self.temperatures = mx.array(manner.temperatures.astype(np.float32))
        # Rows that are all greedy need no noise, which is most of what choosing costs.
        self.choose = compiled(partial(_choose, top_p=manner.top_p, greedy=not manner.temperatures.any()))
        self.on_device()

    def on_device(self) -> None:
        self.texts, self.ends = mx.array(self.forced[self.live]), mx.array(self.lengths[self.live])

    def prefill(self) -> mx.array:
        if self.shortest > 1:
            self.target.core(self.texts[:, : self.shortest - 1], cache=self.caches)
            mx.eval([leaf.state for leaf in self.leaves])
        return self.texts[:, self.shortest - 1]

    def step(self, token: mx.array, position: int, key: mx.array) -> mx.array:
        """The tokens [B] at `position`, given those in front of it."""
        out = self.target.core(token[:, None], cache=self.caches)
        chosen = self.choose(getattr(out, "logits", out)[:, -1], self.temperatures, key)
        if position < self.texts.shape[1]:
            chosen = mx.where(position < self.ends, self.texts[:, position], chosen)
        return chosen

    def keep(self, block: mx.array, position: int) -> None:
        tokens = np.array(block)
        self.out[self.live, position : position + tokens.shape[1]] = tokens

    def compact(self, token: mx.array) -> mx.array:
        """Drop rows that have stopped, if they are many and every cache can be cut by rows."""
        out, lengths = self.out[self.live], self.lengths[self.live]
        places = np.arange(out.shape[1])
        own = (places >= lengths[:, None]) & (places < lengths[:, None] + self.max_tokens) & (out >= 0)
        going = ~(np.isin(out, self.stops) & own).any(1) & (own.sum(1) < self.max_tokens)
        if not going.any():
            self.live = self.live[:0]
            return token
        if going.mean() > COMPACT_BELOW or any(type(leaf).__name__ != "KVCache" for leaf in self.leaves):
            return token
        picked = mx.array(np.flatnonzero(going))
        for leaf in self.leaves:
            leaf.keys, leaf.values = leaf.keys[picked], leaf.values[picked]
        self.live = self.live[going]
        self.temperatures, token = self.temperatures[picked], token[picked]
        self.on_device()
        mx.eval(token, [leaf.keys for leaf in self.leaves], [leaf.values for leaf in self.leaves])
        return token

    def written(self) -> list[Written]:
        found = []
        for row, length in zip(self.out, self.lengths, strict=True):
            own = row[length : length + self.max_tokens]
            own = own[own >= 0]
            ends = np.flatnonzero(np.isin(own, self.stops))
            found.append(Written(own[: ends[0]].tolist() if ends.size else own.tolist(), bool(ends.size)))
        return found


def _choose(logits: mx.array, temperatures: mx.array, key: mx.array, top_p: float, greedy: bool) -> mx.array:
    if greedy:
        return mx.argmax(logits, axis=-1).astype(mx.int32)
    logits = logits.astype(mx.float32)
    warm = mx.where(temperatures > 0, temperatures, 1.0)[:, None]
    scaled = logits / warm
    if top_p < 1:
        scaled = nucleus(scaled, top_p)
    noise = mx.random.gumbel(logits.shape, key=key)
    # Greedy rows are drawn without noise.
    return mx.argmax(mx.where(temperatures[:, None] > 0, scaled + noise, logits), axis=-1).astype(mx.int32)


def nucleus(logits: mx.array, top_p: float) -> mx.array:
    """-inf outside the likeliest tokens whose mass reaches `top_p`. By bisection instead of a sort of the vocabulary: the
    set is the smallest up to a factor of 1.006 in the probability at its edge, and never too small."""
    chances = mx.softmax(logits, axis=-1, precise=True)
    top = mx.log(mx.max(chances, axis=-1, keepdims=True))
    low, high = top - DEEPEST, top
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        enough = mx.sum(mx.where(chances >= mx.exp(middle), chances, 0.0), axis=-1, keepdims=True) >= top_p
        low, high = mx.where(enough, middle, low), mx.where(enough, high, middle)
    return mx.where(chances >= mx.exp(low), logits, -mx.inf)
