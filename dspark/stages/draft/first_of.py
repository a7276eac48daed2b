"""The hybrid drafter: ask each branch in turn, row by row, and keep every branch's context right whoever drafted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import attrs
import mlx.core as mx

from dspark.caps.base import cap_for
from dspark.errors import InputError
from dspark.records import Acceptance, DenseQ, Opening, Proposal, Settled, SparseQ
from dspark.stages.base import AbstractDraft, no_proposal
from dspark.stages.registry import register_draft


def _at_least_one(instance: Any, attribute: Any, value: tuple[AbstractDraft, ...]) -> None:
    if not value:
        raise InputError("branches is empty; a hybrid drafter needs at least one branch")


@register_draft("hybrid")
@attrs.frozen
class FirstOf(AbstractDraft):
    """Take the first branch's proposal that is not empty; in a batch the choice is by row.

    A cap that tells drafters apart limits each branch by itself. Where the target is at work already with what one branch began
    early, those in front of it wait for the next round. Branches behind the chosen one absorb the committed tokens
    through `skip`, at once. Costs what the branches asked cost: in a batch a branch drafts if any row missed before it.
    """

    branches: tuple[AbstractDraft, ...] = attrs.field(converter=tuple, validator=_at_least_one)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset().union(*(b.needs for b in self.branches))

    @cached_property
    def target_layer_ids(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(i for b in self.branches for i in b.target_layer_ids))

    @property
    def reads(self) -> int:
        return max(b.reads for b in self.branches)

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(s for b in self.branches for s in b.sources))

    @property
    def heads(self) -> tuple[Any, ...]:
        return tuple(head for b in self.branches for head in b.heads)

    @property
    def knows_q(self) -> bool:
        return any(b.knows_q for b in self.branches)

    @property
    def longest(self) -> int | None:
        known = [b.longest for b in self.branches]
        return None if None in known else max(n for n in known if n is not None)

    def bind(self, target: Any) -> FirstOf:
        return attrs.evolve(self, branches=tuple(b.bind(target) for b in self.branches))

    @property
    def written(self) -> FirstOf:
        return FirstOf(tuple(b.written for b in self.branches))

    @property
    def details(self) -> tuple[str, ...]:
        return tuple(line for b in self.branches for line in b.details)

    def init(self, opening: Opening) -> tuple[Any, ...]:
        return tuple(b.init(opening) for b in self.branches)

    def resume(self, carry: tuple[Any, ...], opening: Opening) -> tuple[Any, ...]:
        return tuple(b.resume(c, opening) for b, c in zip(self.branches, carry, strict=True))

    def skip(self, settled: Settled, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(b.skip(self._view(b, settled), c) for b, c in zip(self.branches, carry, strict=True))

    def __call__(self, settled: Settled, carry: tuple[Any, ...], cap: int) -> tuple[Proposal, tuple[Any, ...]]:
        chosen: Proposal | None = None
        carries, waits = list(carry), False
        sent = self._sent(settled, carry, cap)
        for i, branch in enumerate(self.branches):
            view, most = self._view(branch, settled), cap_for(cap, branch.sources)
            if sent is not None and i < sent and most:
                # What it has to say comes a round later.
                proposal, carries[i] = branch(view, carry[i], most)
                waits = waits or any(proposal.offered)
                continue
            if not most or (chosen is not None and all(chosen.offered)):
                carries[i] = branch.skip(view, carry[i])
                continue
            proposal, carries[i] = branch(view, carry[i], most)
            chosen = proposal if chosen is None or not any(chosen.offered) else _fill(chosen, proposal)
        if chosen is None:
            return no_proposal(settled), tuple(carries)
        return chosen._replace(waits=True) if waits else chosen, tuple(carries)

    def _sent(self, settled: Settled, carry: tuple[Any, ...], cap: int) -> int | None:
        """The branch with whose block the target is at work already."""
        if settled.sent is None:
            return None
        for i, (branch, own) in enumerate(zip(self.branches, carry, strict=True)):
            if branch.begun(own) is settled.sent:
                return i if cap_for(cap, branch.sources) >= settled.sent.shape[1] - 1 else None
        return None

    def _view(self, branch: AbstractDraft, settled: Settled) -> Settled:
        """What a branch sees: its own taps, out of those captured for all."""
        if settled.taps is None or branch.target_layer_ids == self.target_layer_ids:
            return settled
        if not branch.target_layer_ids:
            return settled._replace(taps=None)
        size = settled.taps.shape[-1] // len(self.target_layer_ids)
        places = [self.target_layer_ids.index(i) for i in branch.target_layer_ids]
        columns = [settled.taps[..., p * size : (p + 1) * size] for p in places]
        return settled._replace(taps=mx.concatenate(columns, axis=-1))

    def pending(self, carry: tuple[Any, ...]) -> Sequence[mx.array]:
        return [array for b, c in zip(self.branches, carry, strict=True) for array in b.pending(c)]

    def foresee(self, acceptance: Acceptance, carry: tuple[Any, ...], cap: int) -> tuple[Any, ...]:
        return tuple(
            b.foresee(acceptance, c, cap_for(cap, b.sources)) if b.target_layer_ids == self.target_layer_ids else c
            for b, c in zip(self.branches, carry, strict=True)
        )

    def begun(self, carry: tuple[Any, ...]) -> mx.array | None:
        blocks = (b.begun(c) for b, c in zip(self.branches, carry, strict=True))
        return next((block for block in blocks if block is not None), None)

    def take(self, carry: tuple[Any, ...], rows: Sequence[int]) -> tuple[Any, ...]:
        return tuple(b.take(c, rows) for b, c in zip(self.branches, carry, strict=True))

    def join(self, carry: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(b.join(c, o) for b, c, o in zip(self.branches, carry, other, strict=True))


def first_of(*branches: AbstractDraft) -> FirstOf:
    """`first_of(lookup, dspark)`: draft with the first branch that has something to say."""
    return FirstOf(branches)


def _fill(first: Proposal, second: Proposal) -> Proposal:
    """Rows of `first` where it offers something, rows of `second` elsewhere; the narrower one is padded."""
    width = max(first.tokens.shape[1], second.tokens.shape[1])
    mine = mx.array([bool(n) for n in first.offered])
    pick = lambda a, b: mx.where(mine.reshape(-1, *[1] * (a.ndim - 1)), a, b)
    offered = tuple(a or b for a, b in zip(first.offered, second.offered, strict=True))
    source = tuple(a if n else b for n, a, b in zip(first.offered, first.source, second.source, strict=True))
    q = second.q
    if q is not None:
        q = _mixed(first, q, width, mine)
    tokens = pick(_pad(first.tokens, width), _pad(second.tokens, width))
    keep = second.keep
    if keep is not None:
        keep = mx.where(mine, mx.array(first.offered), keep)
    return Proposal(first.anchor, tokens, offered, q, source, first.start, keep)


def _mixed(first: Proposal, q: SparseQ | DenseQ, width: int, mine: mx.array) -> SparseQ | DenseQ:
    """The q of both: the first's rows are point masses, written in the second's form."""
    assert first.q is None, "only the last branch of a batch may draw from a distribution"
    tokens = _pad(first.tokens, width)[..., None]
    here = mine[:, None, None]
    if isinstance(q, SparseQ):
        return _mixed_sparse(tokens, q, width, here)
    probs = _pad(q.probs, width)
    point = (mx.arange(probs.shape[-1]) == tokens).astype(probs.dtype)
    return DenseQ(mx.where(here, point, probs))


def _mixed_sparse(tokens: mx.array, q: SparseQ, width: int, here: mx.array) -> SparseQ:
    """Ids stay unique in a slot: the point takes its own place among the candidates, or else the first one's."""
    short, candidates = width - q.ids.shape[1], mx.arange(q.ids.shape[2], dtype=q.ids.dtype)
    spare = mx.broadcast_to(candidates, (q.ids.shape[0], short, q.ids.shape[2]))
    ids = mx.concatenate([q.ids, spare], axis=1)
    known = mx.any(ids == tokens, axis=-1, keepdims=True)
    ids = mx.where(here & ~known & (candidates == 0), tokens, ids)
    mass = (ids == tokens).astype(q.probs.dtype)
    return SparseQ(ids, mx.where(here, mass, _pad(q.probs, width)))


def _pad(x: mx.array, width: int) -> mx.array:
    short = width - x.shape[1]
    return mx.pad(x, [(0, 0), (0, short), *[(0, 0)] * (x.ndim - 2)]) if short else x
