"""Rounds replayed on stored acceptance traces: what every cap would have taken on a cost curve. Pure: no model, no timing.

A trace says what each drafter would have had accepted at every position of an answer. A replay walks along it under any cap and
takes its milliseconds from a curve, so that caps can be compared on this machine's curve and on any other's.
"""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dspark.caps import AbstractCap, AdaptiveCap, FixedCap
from dspark.caps.base import cap_for
from dspark.caps.curve import CostCurve
from dspark.caps.price import best_cap, choices, price_list
from dspark.errors import InputError
from dspark.records import RoundEvent, RowCommit, Shadow

# Replays begin at each of the first tokens of an answer: where rounds happen to fall is luck, which averages out.
BEGINNINGS = 8
# Orders in which answers are replayed as sessions of one engine, and answers of a kind in each.
ORDERS, AT_ONCE = 16, 8
FIXED = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 16, 24, 32)
Judged = tuple[int, int]


class Trace(NamedTuple):
    """prompt_tokens; for each drafter, in the order in which they are asked, (offered, accepted) at every position."""

    prompt_tokens: int
    offers: dict[str, list[Judged]]

    @property
    def length(self) -> int:
        return min(map(len, self.offers.values()))

    def behind(self, tokens: int) -> Trace:
        """The trace of what follows behind so many tokens of the answer."""
        return Trace(self.prompt_tokens + tokens, {source: judged[tokens:] for source, judged in self.offers.items()})


class Replayed(NamedTuple):
    """Milliseconds and rounds of a replay, and the cap's last carry."""

    ms: float
    rounds: int
    carry: Any


class Row(NamedTuple):
    """What caps bring on the texts of one kind, times plain decoding. fixed: by cap, 0 being plain; own: the cap that the
    curve derives from these texts' own acceptance; start: the one it derives from the usual acceptance; adaptive: the
    adaptive cap that begins there."""

    tokens: int
    fixed: dict[int, float]
    own: int
    start: int
    adaptive: float

    @property
    def best(self) -> int:
        return max(self.fixed, key=lambda cap: self.fixed[cap])


# ---- one answer, several answers ------------------------------------------------------------------------------------


def replay(cap: AbstractCap, trace: Trace, costs: CostCurve, carry: Any, waking: float = 0.0) -> Replayed:
    """A session under `cap`, its rounds taking what the curve says; the first drafted round behind others takes `waking` ms
    longer. Where the curve has it that a drafter's rounds are sent before the ones in front are read, they are where the cap is
    sure of them, and others wait for such a round."""
    at, ms, rounds, sent = 0, 0.0, 0, False
    begun: tuple[str, int] | None = None
    shadow: tuple[int, Shadow] | None = None
    while at < trace.length:
        offer, parked = cap.propose(carry), cap.parked_rounds(carry) > 0
        source, offered, draft_ms = first = drafted(trace, costs, at, offer)
        follows = begun is not None and cap_for(offer, begun[:1]) >= begun[1]
        if follows:
            source, offered, draft_ms = drafted(trace, costs, at, offer, begun[0])
        elif draft_ms < 0:
            draft_ms = 0.0
        offered, width = cap.fit(carry, source, offered) if offered else (0, 1)
        accepted = min(trace.offers[source][at][1], offered) if offered else 0
        depth = trace.prompt_tokens + at
        # The first step of a park waits for the round before it.
        ahead = parked and sent
        took = costs.plain_at(depth) if ahead else costs.verify_at(width, depth) + costs.host_ms
        judged = (shadow[1],) if shadow and ahead and at >= shadow[0] else ()
        shadow = shadow if ahead and not judged else None
        peek = cap.shadow(carry) if ahead and shadow is None else 0
        if peek:
            beside, found, draft_ms = drafted(trace, costs, at, peek)
            shadow = (at + found, Shadow(beside, found, min(trace.offers[beside][at][1], found))) if found else None
        took += draft_ms + (waking if offered and (sent or not rounds) else 0.0)
        sent, rounds, ms = parked, rounds + 1, ms + took
        kept = min(accepted + 1, trace.length - at)
        row = RowCommit(0, (0,) * kept, min(accepted, kept), offered, source if offered else "plain")
        event = RoundEvent(
            rounds, (row,), int(offer), "", width, 1, took, (depth,), shadow=int(peek), judged=judged, ahead=follows
        )
        carry = cap.ponder(carry, (depth,))
        begun, draft = None, costs.draft(source) if offered else None
        if draft is not None and min(draft.ms) < 0 and not (follows and first[0] != source):
            drafts = min(cap_for(cap.sure(carry), (source,)), draft.longest)
            if drafts and cap.fit(carry, source, drafts) == (drafts, drafts + 1):
                begun = source, drafts
        carry = cap.observe(carry, event)
        at += kept
    return Replayed(ms, rounds, carry)


def drafted(trace: Trace, costs: CostCurve, at: int, offer: int, only: str = "") -> tuple[str, int, float]:
    """(who drafts here, how much, milliseconds) where the first drafter that finds something is taken. only: whose block is under
    way."""
    ms = 0.0
    for name, judged in trace.offers.items():
        if only not in ("", name):
            continue
        limit = min(cap_for(offer, (name,)), costs.longest(name), trace.length - at - 1)
        if limit > 0:
            draft = costs.draft(name)
            ms += draft.at(limit) if draft else 0.0
            if found := min(judged[at][0], limit):
                return name, found, ms
    return "", 0, ms


def replay_all(cap: AbstractCap, traces: Sequence[Trace], costs: CostCurve) -> float:
    """Milliseconds of several answers one after the other, as sessions of one engine: what the cap learned stays."""
    total, carry = 0.0, None
    for trace in traces:
        done = replay(cap, trace, costs, cap.init(costs) if carry is None else cap.again(carry, costs))
        total, carry = total + done.ms, done.carry
    return total


def plain_ms(traces: Sequence[Trace], costs: CostCurve) -> float:
    return sum(costs.plain_at(t.prompt_tokens + at) for t in traces for at in range(t.length))


class InARow(NamedTuple):
    """Answers of one kind among others of one engine. ratio: times plain decoding; accepted: tokens a round."""

    ratio: float
    accepted: float


def in_a_row(
    cap: AbstractCap, kinds: Mapping[str, Sequence[Trace]], costs: CostCurve, told: CostCurve, waking: float
) -> dict[str, InARow]:
    """Kind after kind as sessions of one engine that was told another curve than rounds take. What one answer leaves to the next
    is luck: so many times over, in an order of its own each."""
    plain, ms, tokens, rounds = (dict.fromkeys(kinds, 0.0) for _ in range(4))
    for seed in range(ORDERS):
        order, carry = random.Random(seed), None
        for name, traces in kinds.items():
            for trace in order.sample([t.behind(n) for n in range(BEGINNINGS) for t in traces], k=AT_ONCE):
                done = replay(cap, trace, costs, cap.init(told) if carry is None else cap.again(carry, told), waking)
                carry = done.carry
                ms[name], rounds[name] = ms[name] + done.ms, rounds[name] + done.rounds
                plain[name], tokens[name] = plain[name] + plain_ms([trace], costs), tokens[name] + trace.length
    return {name: InARow(plain[name] / ms[name], tokens[name] / rounds[name]) for name in kinds}


# ---- a table of them ------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """A drafter in the rounds of sessions that always offer all there is. share: of rounds; rates: acceptance by position, of
    the drafts that were judged there, all before them accepted."""

    share: float
    rates: tuple[float, ...]


def acceptance(traces: Sequence[Trace], most: int) -> dict[str, Seen]:
    """What each drafter of these texts shows in rounds of cap `most`. Rounds count, not tokens: every token as a round's
    beginning would count a good stretch once for each of its tokens."""
    rounds, seen, hits = 0, dict[str, list[int]](), dict[str, list[int]]()
    for trace in traces:
        at = 0
        while at < trace.length:
            asked = ((source, *judged[at]) for source, judged in trace.offers.items())
            source, offered, accepted = next((found for found in asked if found[1]), ("", 0, 0))
            accepted, rounds = min(accepted, most), rounds + 1
            judged = min(accepted + 1, offered, most)
            for counts, stood in ((seen, judged), (hits, accepted)):
                now = counts.setdefault(source, [0] * most)
                counts[source] = [n + (i < stood) for i, n in enumerate(now)]
            at += accepted + 1
    known = {source: counts for source, counts in seen.items() if source}
    rates = lambda source: tuple(h / s for h, s in zip(hits[source], seen[source], strict=True) if s)
    return {source: Seen(counts[0] / rounds, rates(source)) for source, counts in known.items()}


def own_cap(traces: Sequence[Trace], costs: CostCurve, most: int) -> int:
    """The cap that the curve derives from these texts' own acceptance. Several drafters share a fixed cap: it is the best for
    all their rounds together."""
    found, depth = acceptance(traces, most), depth_of(traces)
    if len(found) < 2:
        return next((best_cap(costs, seen.rates, depth, source).cap for source, seen in found.items()), 0)
    # Drafts are as long as were ever offered: a match ends.
    longest = {source: len(seen.rates) for source, seen in found.items()}
    tables = {s: choices(price_list(costs, depth, s, longest[s]), seen.rates) for s, seen in found.items()}
    best, rate = 0, 1.0 / costs.plain_at(depth)
    for cap in range(1, max(map(len, tables.values()))):
        tried = [(found[source].share, table[min(cap, len(table) - 1)]) for source, table in tables.items()]
        now = sum(share * c.tokens for share, c in tried) / sum(share * c.ms for share, c in tried)
        best, rate = (cap, now) if now > rate else (best, rate)
    return best


def depth_of(traces: Sequence[Trace]) -> float:
    """The middle of these answers' contexts, in tokens."""
    return sum(t.prompt_tokens + t.length / 2 for t in traces) / len(traces)


def row(traces: Sequence[Trace], costs: CostCurve, start: int) -> Row:
    """What every cap takes on these traces. `start`: the cap derived from the usual acceptance."""
    answers = [[t.behind(n) for t in traces] for n in range(BEGINNINGS)]
    took = lambda cap: sum(replay_all(cap, some, costs) for some in answers)
    plain = sum(plain_ms(some, costs) for some in answers)
    most = max(offered for trace in traces for judged in trace.offers.values() for offered, _ in judged)
    own = own_cap([t for some in answers for t in some], costs, most)
    tried = sorted({cap for cap in FIXED if cap <= most} | {cap for cap in (own, start) if cap})
    fixed = {0: 1.0} | {cap: plain / took(FixedCap(cap)) for cap in tried}
    return Row(sum(t.length for t in traces), fixed, own, start, plain / took(AdaptiveCap(start=start)))


HEAD = """
| prompts | tokens | best fixed cap | derived for this text | start | adaptive | adaptive to best | derived to best |
|---|---|---|---|---|---|---|---|"""
FOOT = """
Times plain decoding, by replay: traces of the greedy answers, milliseconds of the curve. start: the cap derived for an
acceptance of 65 %, where no text is known yet."""


def line_of(name: str, found: Row) -> str:
    top = found.fixed[found.best]
    cells = [name, str(found.tokens)]
    cells += [f"{cap}: {found.fixed[cap]:.3f}" for cap in (found.best, found.own, found.start)]
    cells += [f"{found.adaptive:.3f}", f"{found.adaptive / top:.3f}", f"{found.fixed[found.own] / top:.3f}"]
    return "| " + " | ".join(cells) + " |"


def to_dict(found: Row, traces: Sequence[Trace]) -> dict[str, Any]:
    return found._asdict() | {"traces": [t._asdict() for t in traces]}


# ---- files ----------------------------------------------------------------------------------------------------------


def stored_traces(path: str) -> tuple[dict[str, list[Trace]], CostCurve]:
    """The traces by kind of text and the curve of a file that `--json` wrote. Raises InputError where it is none."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        return {name: _traces(found) for name, found in data["replays"].items()}, CostCurve.from_dict(data["curve"])
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}: is no file of traces ({error!r}); python -m benchmarks.caps --json {path} writes one"
        ) from None


def _traces(found: Mapping[str, Any]) -> list[Trace]:
    pairs = lambda offers: {source: [(int(o), int(a)) for o, a in judged] for source, judged in offers.items()}
    return [Trace(int(t["prompt_tokens"]), pairs(t["offers"])) for t in found["traces"]]


def stored_curve(path: str) -> CostCurve:
    """The curve of a calibration's file. Raises InputError where it has none."""
    try:
        return CostCurve.from_dict(tomllib.loads(Path(path).read_text(encoding="utf-8"))["measured"]["costs"])
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: is no calibration ({error!r}); dspark calibrate writes one") from None
