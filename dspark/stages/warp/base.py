"""What a link is: logits in, logits out, and a declaration of the past tokens that it has to see."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

from dspark.errors import InputError


class Context(NamedTuple):
    """The past of every row of a block, drafted tokens before that row included.

    recent [B, W, R] int32: the last R tokens, prompt included (a short past repeats its first token); counts [B, W, V]
    float32: how often each token stands in the answer so far. Either is None where no link asks for it.
    """

    recent: mx.array | None = None
    counts: mx.array | None = None


NO_CONTEXT = Context()


class AbstractWarp(ABC):
    """One link of a chain: `(logits [B, W, V] float32, context) -> logits`.

    `reorders`: whether it can change which token is likeliest (penalties, bias); links that do not are skipped by greedy
    decoding. `recent_tokens`: how many past tokens it looks at; `counts`: whether it needs the answer's token counts.
    """

    reorders: ClassVar[bool] = False
    counts: ClassVar[bool] = False

    @property
    def recent_tokens(self) -> int:
        return 0

    @property
    def is_greedy(self) -> bool:
        """Whether nothing but the likeliest token is left behind it."""
        return False

    @property
    def is_identity(self) -> bool:
        """Whether it leaves logits as they are, so that a chain may leave it out."""
        return False

    def check(self, vocab_size: int) -> None:  # noqa: B027
        """Raise InputError where the link does not fit a vocabulary."""

    @abstractmethod
    def __call__(self, logits: mx.array, context: Context) -> mx.array: ...


def number(name: str, low: float = -math.inf, high: float = math.inf, *, above: float | None = None) -> Any:
    """attrs validator: a number from `low` to `high`, or above `above`; never NaN, an infinity or a bool."""
    wanted = "a finite number"
    if above is not None:
        wanted += f" above {above:g}"
    elif high < math.inf:
        wanted = f"a number from {low:g} to {high:g}"
    elif low > -math.inf:
        wanted += f" of at least {low:g}"

    def validate(instance: Any, attribute: Any, value: Any) -> None:
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not good or not low <= value <= high or (above is not None and value <= above):
            raise InputError(f"{name} is {value!r}; it must be {wanted}")

    return validate


def whole(name: str, low: int) -> Any:
    """attrs validator: a whole number of at least `low`."""

    def validate(instance: Any, attribute: Any, value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise InputError(f"{name} is {value!r}; it must be a whole number of at least {low}")

    return validate
