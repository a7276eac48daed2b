"""by_row: one accept stage for a batch whose rows have different options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs
import mlx.core as mx

from dspark.errors import InputError
from dspark.records import Acceptance, DenseQ, Logprobs, Opening, Proposal, SparseQ, Verdict
from dspark.stages.base import AbstractAccept


class Group(NamedTuple):
    """Rows that share an accept stage, ascending, and that stage's carry; error: what it raised, when it did."""

    accept: AbstractAccept
    rows: tuple[int, ...]
    carry: Any
    error: Exception | None = None


@attrs.frozen
class ByRow(AbstractAccept):
    """Run each distinct stage of `accepts` on its own rows and put the results together.

    `accepts`: one a row of the opening. Which row belongs to which stage is kept in the carry, so rows may retire and join
    other rows (those of another ByRow) while the stage stays the same. Costs one gather a distinct stage.
    """

    accepts: tuple[AbstractAccept, ...]

    def init(self, opening: Opening) -> tuple[Group, ...]:
        if len(self.accepts) != len(opening.prompts):
            raise InputError(f"there are options for {len(self.accepts)} rows and prompts for {len(opening.prompts)}")
        groups = []
        for accept in _distinct(self.accepts):
            rows = tuple(r for r, own in enumerate(self.accepts) if own == accept)
            prompts, seeds = (tuple(host[r] for r in rows) for host in (opening.prompts, opening.seeds))
            carry = accept.init(opening._replace(prompts=prompts, seeds=seeds, accept=accept))
            groups.append(Group(accept, rows, carry))
        return tuple(groups)

    def __call__(self, verdict: Verdict, carry: tuple[Group, ...]) -> tuple[Acceptance, tuple[Group, ...]]:
        parts, groups = [], []
        for group in carry:
            own = verdict if len(carry) == 1 else some_rows(verdict, group.rows)
            for part, after in _isolated(group, own):
                parts.append(part)
                groups.append(after)
        if len(groups) == 1:
            return parts[0], tuple(groups)
        order = [r for group in groups for r in group.rows]
        back = mx.array([order.index(r) for r in range(len(order))], dtype=mx.int32)
        accepted = mx.concatenate([part.accepted for part in parts])[back]
        following = mx.concatenate([part.next for part in parts])[back]
        return Acceptance(verdict, accepted, following, _logprobs(parts, back)), tuple(groups)

    def take(self, carry: tuple[Group, ...], rows: Sequence[int]) -> tuple[Group, ...]:
        groups = []
        for group in carry:
            kept = [(new, group.rows.index(old)) for new, old in enumerate(rows) if old in group.rows]
            if kept:
                own = group.accept.take(group.carry, [at for _, at in kept])
                groups.append(Group(group.accept, tuple(new for new, _ in kept), own))
        return tuple(groups)

    def join(self, carry: tuple[Group, ...], other: tuple[Group, ...]) -> tuple[Group, ...]:
        groups, before = list(carry), sum(len(group.rows) for group in carry)
        for group in other:
            rows = tuple(before + r for r in group.rows)
            at = next((i for i, known in enumerate(groups) if known.accept == group.accept), None)
            if at is None:
                groups.append(group._replace(rows=rows))
            else:
                both = group.accept.join(groups[at].carry, group.carry)
                groups[at] = Group(group.accept, groups[at].rows + rows, both)
        return tuple(groups)


def failures(carry: tuple[Group, ...]) -> dict[int, Exception]:
    """The rows whose stage raised in the last round, and what."""
    return {row: group.error for group in carry if group.error is not None for row in group.rows}


def _isolated(group: Group, verdict: Verdict) -> list[tuple[Acceptance, Group]]:
    """Decide a group; where its stage raises, row by row, so that a row's error is its own."""
    try:
        acceptance, after = group.accept(verdict, group.carry)
        return [(acceptance, group._replace(carry=after))]
    except Exception as error:
        if len(group.rows) == 1:
            nothing = mx.zeros((1,), mx.int32)
            return [(Acceptance(verdict, nothing, nothing), group._replace(error=error))]
    alone = []
    for i, row in enumerate(group.rows):
        one = Group(group.accept, (row,), group.accept.take(group.carry, [i]))
        alone += _isolated(one, some_rows(verdict, [i]))
    return alone


def by_row(accepts: Sequence[AbstractAccept]) -> AbstractAccept:
    """One stage for rows with these stages, in order: the stage itself where all are equal."""
    distinct = _distinct(accepts)
    return distinct[0] if len(distinct) == 1 else ByRow(tuple(accepts))


def row_accepts(accept: AbstractAccept, rows: int) -> tuple[AbstractAccept, ...]:
    """The stage of each row, for drafters that draw as a row's options say."""
    return accept.accepts if isinstance(accept, ByRow) else (accept,) * rows


def some_rows(verdict: Verdict, rows: Sequence[int]) -> Verdict:
    """The verdict of some rows, without taps, which no accept stage reads."""
    at = mx.array(list(rows), dtype=mx.int32)
    old, q = verdict.proposal, verdict.proposal.q
    if isinstance(q, DenseQ):
        q = DenseQ(q.probs[at])
    elif isinstance(q, SparseQ):
        q = SparseQ(q.ids[at], q.probs[at])
    offered, start = (tuple(host[r] for r in rows) for host in (old.offered, old.start))
    proposal = Proposal(old.anchor[at], old.tokens[at], offered, q, tuple(old.source[r] for r in rows), start)
    return Verdict(proposal, verdict.logits[at], None)


def _distinct(accepts: Sequence[AbstractAccept]) -> list[AbstractAccept]:
    distinct: list[AbstractAccept] = []
    for accept in accepts:
        if accept not in distinct:
            distinct.append(accept)
    return distinct


def _logprobs(parts: Sequence[Acceptance], back: mx.array) -> Logprobs | None:
    """Put log-probabilities together. Rows that asked for fewer hold -1 and -inf behind theirs, or NaN and no top at all."""
    width = max((p.logprobs.top_ids.shape[-1] for p in parts if p.logprobs is not None), default=None)
    if width is None:
        return None
    rows = []
    for part in parts:
        shape = (part.accepted.shape[0], part.verdict.logits.shape[1])
        own = part.logprobs
        if own is None:
            nothing = mx.zeros((*shape, 0))
            own = Logprobs(mx.full(shape, float("nan")), nothing.astype(mx.int32), nothing)
        short = [(0, 0), (0, 0), (0, width - own.top_ids.shape[-1])]
        ids, values = (
            mx.pad(own.top_ids, short, constant_values=-1),
            mx.pad(own.top_values, short, constant_values=-mx.inf),
        )
        rows.append(Logprobs(own.chosen, ids, values))
    return Logprobs(*(mx.concatenate(list(field))[back] for field in zip(*rows, strict=True)))
