"""Shadows: drafts made beside plain steps and judged by what those say. None is verified, so they cost a draft and no more.

A round that drafts and loses costs a wide verify and a wait for its end; where the drafter is cheap, a shadow asks the same
question for a fraction of it. It is exact wherever drafts stand if they are what plain decoding says: greedy and SampleMatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from dspark.pipeline import Pipeline
from dspark.records import Proposal, RowCommit, Shadow, State, Tokens
from dspark.stages.accept import row_accepts


class Cast(NamedTuple):
    """A shadow under way: what was drafted, on the device, and what each row said since; words: the drafts [B, K] as they are read,
    two of a row in each (`Said`)."""

    proposal: Proposal
    said: tuple[Tokens, ...]
    words: tuple[mx.array, ...]

    def heard(self, commits: Sequence[RowCommit]) -> Cast:
        return self._replace(said=tuple([s + c.tokens for s, c in zip(self.said, commits, strict=True)]))

    @property
    def due(self) -> bool:
        """Whether every draft can be judged."""
        return all(len(said) >= offered for said, offered in zip(self.said, self.proposal.offered, strict=True))


def judgeable(pipeline: Pipeline, rows: int) -> bool:
    """Whether every row keeps a draft exactly where it is what plain decoding says: not where drafts are weighed by q."""
    return not any(getattr(own, "wants_q", False) for own in row_accepts(pipeline.accept, rows))


def cast(pipeline: Pipeline, state: State, cap: int) -> tuple[Cast | None, Any]:
    """Draft behind a state beside the plain step that follows it; None where no drafter had anything to say. Gives the
    drafter's carry too, which has been told of all that is settled, as `told` would have."""
    proposal, carry = pipeline.draft(state.settled, state.draft, cap)
    pending = pipeline.draft.pending(carry) if pipeline.pends else None
    tokens = proposal.tokens
    words = tuple([tokens[:, i : i + 2] + 0 for i in range(0, tokens.shape[1], 2)])
    mx.async_eval(words, proposal.keep, pending)
    return Cast(proposal, ((),) * len(proposal.offered), words) if any(proposal.offered) else None, carry


def judge(shadow: Cast) -> tuple[Shadow, ...]:
    """How much of each row's drafts was said. They were made rounds ago: reading them waits for nothing."""
    proposal, said, words = shadow
    pairs: Any = [word.tolist() for word in words]
    rows = [[token for pair in pairs for token in pair[b]] for b in range(len(said))]
    offers, found = proposal.offered, []
    if proposal.keep is not None:
        # Of what was drafted, a round would offer what the drafter believes in.
        offers = [min(n, k) for n, k in zip(offers, proposal.keep.tolist(), strict=True)]  # type: ignore[arg-type]
    for drafts, heard, offered, source in zip(rows, said, offers, proposal.source, strict=True):
        stands = 0
        while stands < offered and drafts[stands] == heard[stands]:
            stands += 1
        if offered:
            found.append(Shadow(source, offered, stands))
    return tuple(found)
