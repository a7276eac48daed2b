"""Links that raise or lower single tokens: a bias, and penalties for what was said before.

Each row of a block sees the drafted tokens in front of it, as plain decoding would.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import attrs
import mlx.core as mx

from dspark.errors import InputError
from dspark.stages.registry import register_warp
from dspark.stages.warp.base import AbstractWarp, Context, number, whole

Bias = Mapping[int, float] | Iterable[tuple[int, float]]


def _pairs(bias: Bias) -> tuple[tuple[int, float], ...]:
    pairs: tuple[Any, ...] = tuple(bias.items()) if isinstance(bias, Mapping) else tuple(bias)
    found: dict[int, float] = {}
    for pair in pairs:
        try:
            token, value = pair
            token, value = int(token), float(value)
        except (TypeError, ValueError):
            raise InputError(f"logit_bias holds {pair!r}; each entry is a token id and a number") from None
        if token < 0 or math.isnan(value) or value == math.inf:
            raise InputError(
                f"logit_bias gives token {token} the bias {value!r}; token ids count from 0 and a bias is finite, "
                "or -inf for a token that must never come"
            )
        found[token] = value
    return tuple(sorted(found.items()))


@register_warp("logit-bias")
@attrs.frozen
class LogitBias(AbstractWarp):
    """Add a number to the logits of single tokens. `bias`: (token id, number) pairs, or a mapping; -inf bans a token."""

    reorders: ClassVar[bool] = True

    bias: tuple[tuple[int, float], ...] = attrs.field(converter=_pairs)

    @property
    def is_identity(self) -> bool:
        return not self.bias

    def check(self, vocab_size: int) -> None:
        if self.bias and self.bias[-1][0] >= vocab_size:
            raise InputError(
                f"logit_bias names token {self.bias[-1][0]}, but this target's vocabulary ends at {vocab_size - 1}"
            )

    def __call__(self, logits: mx.array, context: Context) -> mx.array:
        self.check(logits.shape[-1])
        ids, values = zip(*self.bias, strict=True)
        return logits.at[..., mx.array(ids)].add(mx.array(values))


@register_warp("repetition-penalty")
@attrs.frozen
class RepetitionPenalty(AbstractWarp):
    """Divide positive logits, multiply negative ones, of tokens among the last `context` (prompt included) by `penalty`
    (Keskar et al., arXiv:1909.05858); 1 changes nothing."""

    reorders: ClassVar[bool] = True

    penalty: float = attrs.field(validator=number("repetition_penalty", above=0))
    context: int = attrs.field(default=20, validator=whole("repetition_context", 1))

    @property
    def recent_tokens(self) -> int:
        return 0 if self.is_identity else self.context

    @property
    def is_identity(self) -> bool:
        return self.penalty == 1

    def __call__(self, logits: mx.array, context: Context) -> mx.array:
        assert context.recent is not None
        recent = context.recent[..., -self.context :]
        said = mx.take_along_axis(logits, recent, axis=-1)
        said = mx.where(said < 0, said * self.penalty, said / self.penalty)
        return mx.put_along_axis(logits, recent, said, axis=-1)


@register_warp("presence-penalty")
@attrs.frozen
class PresencePenalty(AbstractWarp):
    """Take `penalty` off the logit of every token that stands in the answer so far (as OpenAI defines it)."""

    reorders: ClassVar[bool] = True
    counts: ClassVar[bool] = True

    penalty: float = attrs.field(validator=number("presence_penalty"))

    @property
    def is_identity(self) -> bool:
        return self.penalty == 0

    def __call__(self, logits: mx.array, context: Context) -> mx.array:
        assert context.counts is not None
        return logits - mx.minimum(context.counts, 1) * self.penalty


@register_warp("frequency-penalty")
@attrs.frozen
class FrequencyPenalty(AbstractWarp):
    """Take `penalty` off a token's logit for each time that it stands in the answer so far (as OpenAI defines it)."""

    reorders: ClassVar[bool] = True
    counts: ClassVar[bool] = True

    penalty: float = attrs.field(validator=number("frequency_penalty"))

    @property
    def is_identity(self) -> bool:
        return self.penalty == 0

    def __call__(self, logits: mx.array, context: Context) -> mx.array:
        assert context.counts is not None
        return logits - context.counts * self.penalty
