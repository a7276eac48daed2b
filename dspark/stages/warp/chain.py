"""`warps(...)`: links applied one after another, in the order given."""

from __future__ import annotations

from functools import cached_property

import attrs
import mlx.core as mx

from dspark.errors import InputError
from dspark.stages.warp.base import NO_CONTEXT, AbstractWarp, Context
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

    @cached_property
    def parts(self) -> tuple[tuple[AbstractWarp, ...], tuple[AbstractWarp, ...]]:
        """The leading links and the rest, as they are computed."""
        active = tuple(link for link in self.links if not link.is_identity)
        leading = next((i for i, link in enumerate(active) if not link.reorders), len(active))
        return active[:leading], fuse(active[leading:])

    @cached_property
    def greedy_rest(self) -> tuple[AbstractWarp, ...]:
        """What of the rest matters to an argmax: nothing, unless a penalty or bias stands among it."""
        return self.parts[1] if any(link.reorders for link in self.parts[1]) else ()

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
        for link in self.parts[0]:
            logits = link(logits, context)
        return logits

    def shape(self, logits: mx.array, context: Context = NO_CONTEXT) -> mx.array:
        """The links behind them: temperature and truncation."""
        for link in self.parts[1]:
            logits = link(logits, context)
        return logits

    def shape_drafts(self, logits: mx.array) -> mx.array:
        """What a drafter applies to its own logits, so that its q lies where p does: the rest without penalties and biases,
        which look at the target's past."""
        for link in self.parts[1]:
            logits = logits if link.reorders else link(logits, NO_CONTEXT)
        return logits

    def shape_greedy(self, processed: mx.array, context: Context) -> mx.array:
        """What of them can change an argmax; mostly nothing."""
        for link in self.greedy_rest:
            processed = link(processed, context)
        return processed

    def __call__(self, logits: mx.array, context: Context = NO_CONTEXT) -> mx.array:
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
