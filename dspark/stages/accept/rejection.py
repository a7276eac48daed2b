"""Rejection: accept a draft with min(1, p / q), else sample from what p has more than q."""

from __future__ import annotations

import attrs
import mlx.core as mx

from dspark.records import DenseQ, SparseQ, Verdict
from dspark.stages.accept.base import AbstractSampler, AcceptCarry, Decision, at_row, count_leading, positions
from dspark.stages.keys import coins, draw, keys
from dspark.stages.registry import register_accept

LEAST_REST = 1e-8


@register_accept("rejection")
@attrs.frozen
class Rejection(AbstractSampler):
    """Speculative sampling (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318): the answer is distributed as
    plain sampling's, and the same tokens come again only with a fixed cap and drafter.

    p is the warped target, q what the draft was drawn from: None for one certain token a slot, sparse (ids unique in a slot)
    or dense; q must be taken behind whatever the drafter truncates. Draft i stands with probability min(1, p(d) / q(d)) by
    the coin of its position; the token that follows is drawn from max(p - q, 0), where the row behind the last draft has no
    q, so it is drawn from p. A rest of at most 1e-8 is rounding, and p stands in for it. Costs a softmax of K + 1 rows and
    noise for one.
    """

    wants_q = True

    def decide(self, verdict: Verdict, logits: mx.array, carry: AcceptCarry) -> Decision:
        proposal, first = verdict.proposal, positions(verdict)
        rows, drafts = proposal.tokens.shape
        noise_keys = keys(carry.seeds, first, drafts + 1, "sample")
        if not drafts:
            said = draw(logits, noise_keys)
            return Decision(mx.array([0] * rows), said[:, 0], said)
        p = mx.softmax(logits, axis=-1)
        coin = coins(carry.seeds, first, drafts)
        stands = coin_times_q(coin, proposal.tokens, proposal.q) < chance(p[:, :drafts], proposal.tokens)
        accepted = count_leading(stands, proposal.offered)
        rest = leftover(at_row(p, accepted), verdict, accepted)
        following = draw(mx.log(rest), at_row(noise_keys, accepted))
        said = None
        if self.logprobs is not None:
            behind = mx.concatenate([proposal.tokens, following[:, None]], axis=1)
            said = mx.where(mx.arange(drafts + 1) == accepted[:, None], following[:, None], behind)
        return Decision(accepted, following, said)


def chance(probs: mx.array, tokens: mx.array) -> mx.array:
    """Of probs [B, K, V] what tokens [B, K] have."""
    return mx.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]


def coin_times_q(coin: mx.array, tokens: mx.array, q: SparseQ | DenseQ | None) -> mx.array:
    if q is None:
        return coin
    if isinstance(q, DenseQ):
        return coin * chance(q.probs, tokens)
    return coin * mx.sum(mx.where(q.ids == tokens[..., None], q.probs, 0), axis=-1)


def leftover(p: mx.array, verdict: Verdict, accepted: mx.array) -> mx.array:
    """max(p - q, 0) of the accepted row, p [B, V]; without q in a row that judges no draft."""
    proposal = verdict.proposal
    judged = accepted < mx.array(proposal.offered)
    slot = mx.minimum(accepted, proposal.tokens.shape[1] - 1)
    q = proposal.q
    if isinstance(q, DenseQ):
        rest = mx.maximum(p - mx.where(judged[:, None], at_row(q.probs, slot), 0), 0)
    else:
        if q is None:
            ids, taken = at_row(proposal.tokens, slot)[:, None], judged[:, None]
        else:
            ids, taken = at_row(q.ids, slot), mx.where(judged[:, None], at_row(q.probs, slot), 0)
        rest = mx.put_along_axis(p, ids, mx.maximum(mx.take_along_axis(p, ids, axis=-1) - taken, 0), axis=-1)
    return mx.where(mx.sum(rest, axis=-1, keepdims=True) > LEAST_REST, rest, p)
