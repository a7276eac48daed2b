"""What the accept stages share: the chain of warps, log-probabilities, and a carry that rows can leave and join."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import attrs
import mlx.core as mx

from dspark.errors import InputError
from dspark.records import Acceptance, Logprobs, Opening, Verdict
from dspark.stages.base import AbstractAccept
from dspark.stages.warp import Warps
from dspark.stages.warp.history import History, advance, begin, join, spread, take
from dspark.stages.warp.select import top


class AcceptCarry(NamedTuple):
    """A seed a row (host) and what penalties remember (device; None without penalties)."""

    seeds: tuple[int, ...]
    history: History | None


class Decision(NamedTuple):
    """accepted [B] int32, following [B] int32 (the token behind them), said [B, W] int32: the token of every row, the
    drafts first and the following one at the accepted row; None where nobody asked for it; report: as in `Said`, or None."""

    accepted: mx.array
    following: mx.array
    said: mx.array | None
    report: mx.array | None = None


def _logprobs(instance: Any, attribute: Any, value: Any) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise InputError(
            f"logprobs is {value!r}; it must be None, or how many of the likeliest tokens to report (0 or more)"
        )


@attrs.frozen
class AbstractSampler(AbstractAccept):
    """warp: links applied to the target's logits first; logprobs: None for none, n for those of the chosen and of the n
    likeliest tokens, which are the log-softmax of the logits behind the leading penalties and biases, in front of
    temperature and truncation (as mlx_lm and OpenAI report them).

    `wants_q`: whether a drafter should draw its drafts and say from what; `only_argmax`: whether links that keep the
    order of tokens are left out. Row i of a block judges the token at position start + 1 + i, and that position is the one
    of its random key.
    """

    wants_q: ClassVar[bool] = False
    only_argmax: ClassVar[bool] = False

    warp: Warps = attrs.field(factory=Warps)
    logprobs: int | None = attrs.field(default=None, validator=_logprobs)

    def init(self, opening: Opening) -> AcceptCarry:
        vocab_size = getattr(opening.target, "vocab_size", None)
        if vocab_size is not None:
            self.warp.check(vocab_size)
        return AcceptCarry(tuple(opening.seeds), begin(self.warp, opening.prompts))

    @abstractmethod
    def decide(self, verdict: Verdict, logits: mx.array, carry: AcceptCarry) -> Decision:
        """The rule itself, on warped logits [B, W, V]."""

    def __call__(self, verdict: Verdict, carry: AcceptCarry) -> tuple[Acceptance, AcceptCarry]:
        logits, tokens = verdict.logits, verdict.proposal.tokens
        block = spread(carry.history, self.warp, tokens, logits.shape[-1])
        plain = self.only_argmax and not self.warp.links
        processed = self.warp.process(logits if plain else logits.astype(mx.float32), block.context)
        shape = self.warp.shape_greedy if self.only_argmax else self.warp.shape
        decision = self.decide(verdict, shape(processed, block.context), carry)
        logprobs = None
        if self.logprobs is not None and decision.said is not None:
            logprobs = report(processed.astype(mx.float32), decision.said, self.logprobs)
        history = advance(carry.history, block, decision.accepted, decision.following)
        acceptance = Acceptance(verdict, decision.accepted, decision.following, logprobs, decision.report)
        return acceptance, AcceptCarry(carry.seeds, history)

    def take(self, carry: AcceptCarry, rows: Sequence[int]) -> AcceptCarry:
        return AcceptCarry(tuple(carry.seeds[r] for r in rows), take(carry.history, rows))

    def join(self, carry: AcceptCarry, other: AcceptCarry) -> AcceptCarry:
        history = join(carry.history, other.history, len(carry.seeds), len(other.seeds))
        return AcceptCarry(carry.seeds + other.seeds, history)


def positions(verdict: Verdict) -> tuple[int, ...]:
    """The position that row 0 judges, per row of the batch."""
    return tuple(start + 1 for start in verdict.proposal.start)


def count_leading(stands: mx.array, offered: tuple[int, ...]) -> mx.array:
    """How many drafts stand [B] int32: the leading ones of stands [B, K], and none behind the offered ones."""
    drafts = stands.shape[1]
    if any(count != drafts for count in offered):
        stands = stands & (mx.arange(drafts) < mx.array(offered)[:, None])
    return mx.sum(mx.cumprod(stands.astype(mx.int32), axis=1), axis=1)


def at_row(array: mx.array, row: mx.array) -> mx.array:
    """array [B, W, ...] at row [B] of each: [B, ...]."""
    return array[mx.arange(array.shape[0]), row]


def leading_match(verdict: Verdict, choice: mx.array) -> Decision:
    """The decision where the target has a choice [B, W] of its own at every row: a draft stands while it equals it."""
    proposal = verdict.proposal
    drafts = proposal.tokens.shape[1]
    if not drafts:
        return Decision(mx.array([0] * choice.shape[0]), choice.squeeze(1), choice)
    accepted = count_leading(proposal.tokens == choice[:, :drafts], proposal.offered)
    return Decision(accepted, at_row(choice, accepted), choice)


def report(processed: mx.array, said: mx.array, n: int) -> Logprobs:
    """Log-probabilities of said [B, W] and of the n likeliest tokens under processed logits [B, W, V]."""
    total = mx.logsumexp(processed, axis=-1, keepdims=True)
    chosen = (mx.take_along_axis(processed, said[..., None], axis=-1) - total)[..., 0]
    if n == 0:
        none = mx.zeros((*said.shape, 0))
        return Logprobs(chosen, none.astype(mx.int32), none)
    values, ids = top(processed, min(n, processed.shape[-1]))
    return Logprobs(chosen, ids.astype(mx.int32), values - total)
