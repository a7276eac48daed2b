"""Greedy: the likeliest token at every position."""

from __future__ import annotations

import attrs
import mlx.core as mx

from dspark.records import Verdict
from dspark.stages.accept.base import AbstractSampler, AcceptCarry, Decision, leading_match
from dspark.stages.registry import register_accept


@register_accept("greedy")
@attrs.frozen
class Greedy(AbstractSampler):
    """A draft stands while it is the argmax of its row; the argmax behind the last one follows. Equals plain greedy decoding
    token for token. Of the chain only what can change an argmax is computed: penalties and biases.
    """

    only_argmax = True

    def decide(self, verdict: Verdict, logits: mx.array, carry: AcceptCarry) -> Decision:
        said = verdict.said
        if said is not None and logits is verdict.logits and verdict.proposal.offered == (said.choice.shape[1] - 1,):
            return Decision(said.accepted, said.following, said.choice, said.report)
        return leading_match(verdict, mx.argmax(logits, axis=-1).astype(mx.int32))
