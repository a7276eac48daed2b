"""Verify: one target forward over the anchor and all drafts. With no draft it is the plain decoding step."""

from __future__ import annotations

from typing import Any

import attrs
import mlx.core as mx

from dspark.records import Proposal, Verdict, new
from dspark.stages.base import AbstractVerify


@attrs.frozen
class Verify(AbstractVerify):
    """Judge a proposal. Costs one target forward of K + 1 rows (and those that the buffers owe)."""

    def __call__(
        self, target: Any, buffers: Any, proposal: Proposal, target_layer_ids: tuple[int, ...] = ()
    ) -> Verdict:
        ids = proposal.anchor if proposal.block is None else proposal.block
        if proposal.block is None and proposal.tokens.size:
            ids = mx.concatenate([ids, proposal.tokens], axis=1)
        logits, taps = buffers.forward(target, ids, target_layer_ids)
        said = getattr(target, "said", None)
        return new(Verdict, (proposal, logits, taps, None if said is None else said(logits)))
