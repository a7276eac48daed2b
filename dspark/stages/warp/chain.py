"""`warps(...)`: links applied one after another, in the order given."""

from __future__ import annotations

import attrs
import mlx.core as mx

from dspark.errors import InputError
from dspark.stages.warp.base import AbstractWarp, Context
from dspark.stages.warp.truncate import MinP, Temperature, TopK, TopKAndP, TopP

MOST_FUSED = 1024


def _links(links: tuple[AbstractWarp, ...]) -> tuple[AbstractWarp, ...]:
    for link in links:
        if not isinstance(link, AbstractWarp):
            raise InputError(f"warps() takes links such as temperature(0.7) or top_p(0.95), not {link!r}")
    return tuple(links)


@attrs.frozen
class Warps:
    """A chain of links, in the order in which they are applied. `Sampling` builds mlx_lm's order.

    The chain falls into two parts: leading links that reorder tokens (penalties, bias) give the logits that
    log-probabilities are reported of; the rest shape the distribution that is sampled from. Links that change nothing are
    left out, and a top-p next to a top-k shares its selection: what the chain computes stays the same.
    """

    links: tuple[AbstractWarp, ...] = attrs.field(default=(), converter=_links)
    _first: tuple[AbstractWarp, ...] = attrs.field(init=False, repr=False, eq=False)
    _rest: tuple[AbstractWarp, ...] = attrs.field(init=False, repr=False, eq=False)

    @_first.default
    def _leading(self) -> tuple[AbstractWarp, ...]:
        active = _active(self.links)
        return active[: _count_leading(active)]

    @_rest.default
    def _trailing(self) -> tuple[AbstractWarp, ...]:
        active = _active(self.links)
        return fuse(active[_count_leading(active) :])

    @property
    def is_greedy(self) -> bool:
        """Whether only the likeliest token is left: temperature 0, top-k 1 or top-p 0."""
        return any(link.is_greedy for link in self.links)

    @property
    def recent_tokens(self) -> int:
        """How many past tokens the links look at."""
        return max((link.recent_tokens for link in self.links), default=0)

    @property
    def counts(self) -> bool:
        """Whether a link needs the answer's token counts."""
        return any(link.counts and not link.is_identity for link in self.links)

    def check(self, vocab_size: int) -> None:
        """Raise InputError where a link does not fit a vocabulary."""
        for link in self.links:
            link.check(vocab_size)

    def process(self, logits: mx.array, context: Context) -> mx.array:
        """The leading penalties and biases. Logits [B, W, V] float32."""
        for link in self._first:
            logits = link(logits, context)
        return logits

    def shape(self, logits: mx.array, context: Context = Context()) -> mx.array:  # noqa: B008
        """The links behind them: temperature and truncation, which a drafter applies to its own logits as well."""
        for link in self._rest:
            logits = link(logits, context)
        return logits

    def shape_greedy(self, processed: mx.array, context: Context) -> mx.array:
        """What of them can change an argmax; mostly nothing."""
        return self.shape(processed, context) if any(link.reorders for link in self._rest) else processed

    def __call__(self, logits: mx.array, context: Context = Context()) -> mx.array:  # noqa: B008
        return self.shape(self.process(logits, context), context)


def warps(*links: AbstractWarp) -> Warps:
    """Chain links; the first one sees the target's own logits. `warps()` changes nothing."""
    return Warps(links)


def fuse(links: tuple[AbstractWarp, ...]) -> tuple[AbstractWarp, ...]:
    """Put a top-p and a top-k that stand side by side, with at most min-p between them, into one selection.

    With top-p first a min-p between them commutes with the top-k (it compares with the likeliest token alone); with
    top-k first it would change the mass that top-p sees, so then they must be neighbours.
    """
    out = list(links)
    for i, link in enumerate(out):
        later = next((j for j in range(i + 1, len(out)) if not isinstance(out[j], (MinP, Temperature))), None)
        if later is None or not isinstance(link, (TopK, TopP)):
            continue
        other = out[later]
        pair = {type(link): link, type(other): other}
        if set(pair) != {TopK, TopP} or any(l.is_greedy for l in pair.values()) or pair[TopK].k > MOST_FUSED:
            continue
        p_first = isinstance(link, TopP)
        if p_first or later == i + 1:
            out[i] = TopKAndP(pair[TopK].k, pair[TopP].p, p_first)
            return (*out[:later], *fuse(tuple(out[later + 1 :])))
    return tuple(out)


def _active(links: tuple[AbstractWarp, ...]) -> tuple[AbstractWarp, ...]:
    return tuple(link for link in links if not link.is_identity)


def _count_leading(links: tuple[AbstractWarp, ...]) -> int:
    return next((i for i, link in enumerate(links) if not link.reorders), len(links))
