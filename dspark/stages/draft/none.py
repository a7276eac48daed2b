"""NoDraft: plain decoding, as a draft stage that never drafts."""

from __future__ import annotations

import attrs

from dspark.records import Opening, Proposal, Settled
from dspark.stages.base import AbstractDraft, no_proposal
from dspark.stages.registry import register_draft


@register_draft("none")
@attrs.frozen
class NoDraft(AbstractDraft):
    """Propose nothing: every round is the plain step, and steps are sent ahead of the last read."""

    @property
    def longest(self) -> int:
        return 0

    def init(self, opening: Opening) -> tuple[None, ...]:
        return (None,) * len(opening.prompts)

    def skip(self, settled: Settled, carry: tuple[None, ...]) -> tuple[None, ...]:
        return carry

    def __call__(self, settled: Settled, carry: tuple[None, ...], cap: int) -> tuple[Proposal, tuple[None, ...]]:
        return no_proposal(settled), carry
