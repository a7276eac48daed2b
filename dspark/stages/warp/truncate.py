"""Links that sharpen or shorten a distribution: temperature, top-k, top-p, min-p. None of them changes the likeliest token.

Equal logits at a border stay together, so what is kept does not depend on the order of the vocabulary.
"""

from __future__ import annotations

import math

import attrs
import mlx.core as mx

from dspark.stages.registry import register_warp
from dspark.stages.warp.base import AbstractWarp, Context, number, whole
from dspark.stages.warp.select import border, nucleus_border, top_values

COLDEST = 1e-5


@register_warp("temperature")
@attrs.frozen
class Temperature(AbstractWarp):
    """Divide logits by `value`. Below 1e-5 only the likeliest token is left, which is greedy decoding."""

    value: float = attrs.field(validator=number("temperature", 0))

    @property
    def is_greedy(self) -> bool:
        return self.value < COLDEST

    @property
    def is_identity(self) -> bool:
        return self.value == 1

    def __call__(self, logits: mx.array, context: Context) -> mx.array:
        return only_best(logits) if self.is_greedy else logits * (1 / self.value)


@register_warp("top-k")
@attrs.frozen
class TopK(AbstractWarp):
    """Keep the `k` likeliest tokens; 0 keeps all, 1 is greedy decoding. Costs one pass and a small selection."""

    k: int = attrs.field(validator=whole("top_k", 0))

    @property
    def is_greedy(self) -> bool:
        return self.k == 1

    @property
    def is_identity(self) -> bool:
        return self.k == 0

    def __call__(self, logits: mx.array, context: Context) -> mx.array:
        if self.is_greedy:
            return only_best(logits)
        if self.k >= logits.shape[-1]:
            return logits
        return keep_from(logits, top_values(logits, self.k)[..., :1])


@register_warp("top-p")
@attrs.frozen
class TopP(AbstractWarp):
    """Keep the shortest list of likeliest tokens whose probabilities sum to at least `p` (Holtzman et al.,
    arXiv:1904.09751); 1 keeps all, 0 is greedy decoding.

    Costs a softmax and a selection by mass; with a top-k in the same chain only a selection of k.
    """

    p: float = attrs.field(validator=number("top_p", 0, 1))

    @property
    def is_greedy(self) -> bool:
        return self.p == 0

    @property
    def is_identity(self) -> bool:
        return self.p == 1

    def __call__(self, logits: mx.array, context: Context) -> mx.array:
        if self.is_greedy:
            return only_best(logits)
        probs = mx.softmax(logits, axis=-1)
        return mx.where(probs >= nucleus_border(probs, self.p), logits, -mx.inf)


@register_warp("min-p")
@attrs.frozen
class MinP(AbstractWarp):
    """Keep tokens at least `p` times as likely as the likeliest one (arXiv:2407.01082); 0 keeps all."""

    p: float = attrs.field(validator=number("min_p", 0, 1))

    @property
    def is_identity(self) -> bool:
        return self.p == 0

    def __call__(self, logits: mx.array, context: Context) -> mx.array:
        return keep_from(logits, mx.max(logits, axis=-1, keepdims=True) + math.log(self.p))


@attrs.frozen
class TopKAndP(AbstractWarp):
    """A top-k and a top-p of one chain in one selection. `p_first`: the nucleus is that of all tokens, not of the k kept."""

    k: int
    p: float
    p_first: bool

    def __call__(self, logits: mx.array, context: Context) -> mx.array:
        values = top_values(logits, min(self.k, logits.shape[-1]))
        total = mx.logsumexp(logits if self.p_first else values, axis=-1, keepdims=True)
        return keep_from(logits, border(mx.exp(values - total), self.p, values))


def keep_from(logits: mx.array, least: mx.array) -> mx.array:
    """Logits of at least `least` [..., 1]; the others are ruled out."""
    return mx.where(logits >= least, logits, -mx.inf)


def only_best(logits: mx.array) -> mx.array:
    """The first of the likeliest tokens alone."""
    best = mx.argmax(logits, axis=-1, keepdims=True)
    return mx.where(mx.arange(logits.shape[-1], dtype=mx.uint32) == best, logits, -mx.inf)
