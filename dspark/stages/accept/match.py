"""SampleMatch: sample every position with its own noise, and keep the drafts that say the same."""

from __future__ import annotations

import attrs
import mlx.core as mx

from dspark.records import Verdict
from dspark.stages.accept.base import AbstractSampler, AcceptCarry, Decision, leading_match, positions
from dspark.stages.keys import draw, keys
from dspark.stages.registry import register_accept


@register_accept("sample-match")
@attrs.frozen
class SampleMatch(AbstractSampler):
    """The token of a row is the Gumbel-argmax of its warped logits with the noise of (seed, position); a draft stands while
    it equals it. Equals plain sampling with the same seed token for token, whatever is drafted and at any cap.

    A draft d stands with probability p(d), which is all that a draft of one certain token (lookup) can have; a drafter
    that draws from its own q does better under `Rejection`, or by drawing with the same "sample" keys. Costs Gumbel noise
    for all K + 1 rows.
    """

    def decide(self, verdict: Verdict, logits: mx.array, carry: AcceptCarry) -> Decision:
        width = logits.shape[1]
        return leading_match(verdict, draw(logits, keys(carry.seeds, positions(verdict), width, "sample")))
