"""Greedy: the likeliest token at every position."""

from __future__ import annotations

import attrs
import mlx.core as mx

from dspark.records import Acceptance, Said, Verdict, new
from dspark.stages.accept.base import AbstractSampler, AcceptCarry, Decision, leading_match
from dspark.stages.registry import register_accept


@register_accept("greedy")
@attrs.frozen
class Greedy(AbstractSampler):
    """A draft stands while it is the argmax of its row; the argmax behind the last one follows. Equals plain greedy decoding
    token for token. Of the chain only what can change an argmax is computed: penalties and biases.
    """

    only_argmax = True

    def __call__(self, verdict: Verdict, carry: AcceptCarry) -> tuple[Acceptance, AcceptCarry]:
        said = _said(verdict)
        if said is None or self.warp.links or self.logprobs is not None or carry.history is not None:
            return super().__call__(verdict, carry)
        # Nothing is left to be done.
        return new(Acceptance, (verdict, said.accepted, said.following, None, said.report)), carry

    def decide(self, verdict: Verdict, logits: mx.array, carry: AcceptCarry) -> Decision:
        said = _said(verdict)
        if said is not None and logits is verdict.logits:
            return Decision(said.accepted, said.following, said.choice, said.report)
        return leading_match(verdict, mx.argmax(logits, axis=-1).astype(mx.int32))


def _said(verdict: Verdict) -> Said | None:
    """What the forward said of the logits as they are, where all its drafts count as offered."""
    said = verdict.said
    return said if said is not None and verdict.proposal.offered == (said.choice.shape[1] - 1,) else None
