"""Lookup: what followed the last time these tokens were seen. No model, no weights, no forward."""

from __future__ import annotations

from typing import Any, NamedTuple

import attrs
import mlx.core as mx

from dspark.errors import InputError
from dspark.records import Opening, Proposal, Settled
from dspark.stages.base import AbstractDraft, no_proposal
from dspark.stages.draft.ngram import Gate, NGramIndex
from dspark.stages.registry import register_draft


class LookupRow(NamedTuple):
    """One row's memory. The two objects change in place; absorbing the same tokens again changes nothing."""

    index: NGramIndex
    gate: Gate


@register_draft("lookup")
@attrs.frozen
class Lookup(AbstractDraft):
    """Propose the continuation of the latest earlier occurrence of the last n tokens, longest n first.

    min_ngram, max_ngram: sizes of n tried; base: tokens drafted behind a short match; longest: a match of 8 tokens or more
    drafts twice its length, at most this many; probe_every: while drafts keep failing, only every so many matches are
    tried. Reads committed tokens on the host; costs a few dictionary look-ups a token.
    """

    min_ngram: int = 3
    max_ngram: int = 5
    base: int = 6
    longest: int = 32
    probe_every: int = 8

    def __attrs_post_init__(self) -> None:
        for name in ("min_ngram", "base", "longest", "probe_every"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_ngram < self.min_ngram:
            raise InputError(
                f"max_ngram is {self.max_ngram}; it must not be below min_ngram, which is {self.min_ngram}"
            )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"host_tokens"})

    @property
    def sources(self) -> tuple[str, ...]:
        return ("lookup",)

    def init(self, opening: Opening) -> tuple[LookupRow, ...]:
        return tuple(
            LookupRow(NGramIndex(self.min_ngram, self.max_ngram), Gate(self.probe_every)) for _ in opening.prompts
        )

    def skip(self, settled: Settled, carry: tuple[LookupRow, ...]) -> tuple[LookupRow, ...]:
        assert settled.tokens is not None, "lookup needs committed tokens on the host"
        for row, tokens, end in zip(carry, settled.tokens, settled.start, strict=True):
            fresh = row.index.absorb(tokens, end)
            if fresh:
                row.gate.judge(tokens[-fresh:])
        return carry

    def __call__(
        self, settled: Settled, carry: tuple[LookupRow, ...], cap: int
    ) -> tuple[Proposal, tuple[LookupRow, ...]]:
        self.skip(settled, carry)
        drafts = [self._draft(row, cap) for row in carry]
        width = max(map(len, drafts))
        if width == 0:
            return no_proposal(settled), carry
        assert settled.tokens is not None
        rows = [[said[-1], *d, *[0] * (width - len(d))] for said, d in zip(settled.tokens, drafts, strict=True)]
        block = mx.array(rows, dtype=mx.int32)
        offered = tuple(len(d) for d in drafts)
        source = tuple("lookup" if d else "plain" for d in drafts)
        return Proposal(settled.anchor, block[:, 1:], offered, None, source, settled.start, None, block), carry

    def _draft(self, row: LookupRow, cap: int) -> list[int]:
        start, depth = row.index.find()
        if not depth or not cap:
            return []
        length = min(row.gate.length(depth, self.base, self.longest), cap)
        drafts = row.index.follow(start, length) if length else []
        row.gate.drafted(drafts)
        return drafts

    def take(self, carry: Any, rows: Any) -> tuple[LookupRow, ...]:
        return tuple(carry[r] for r in rows)
