"""Stored traces replay alike, and the cap that a curve derives from a text's own acceptance is as good as the best fixed one."""

import json
import random

import pytest

from benchmarks import cap_replays
from benchmarks.cap_replays import (
    Trace,
    acceptance,
    in_a_row,
    own_cap,
    plain_ms,
    replay_all,
    row,
    stored_curve,
    stored_traces,
    to_dict,
)
from dspark.caps import AdaptiveCap, FixedCap
from dspark.caps.curve import CostCurve, DraftCost, Grid
from dspark.errors import InputError
from tests.simulated import LONGEST, Text, machine

# Lowest and highest acceptance of a text's stretches of some 20 tokens each: they vary as real text does.
KINDS = {"chat": (0.3, 0.85), "code": (0.5, 1.0), "math": (0.6, 1.0), "copy": (0.1, 1.0)}


def trace(kind: str, tokens: int = 4000, seed: int = 1) -> Trace:
    """What a drafter of blocks would have had accepted at every position of such a text."""
    rng, rates = random.Random(seed), []
    while len(rates) < tokens:
        rates += [rng.uniform(*KINDS[kind])] * rng.randint(1, 40)
    text = Text(lambda t: rates[t], tokens, seed)
    return Trace(20, {"dspark": [(LONGEST, text.accepted(at, LONGEST, "dspark")) for at in range(tokens)]})


def to_best(kind: str, name: str, cap_of) -> float:
    """The speed of a derived cap against that of the best fixed one."""
    costs, some = machine(name), [trace(kind)]
    took = {cap: replay_all(FixedCap(cap), some, costs) for cap in range(LONGEST + 1)}
    return min(took.values()) / took[cap_of(some, costs)]


@pytest.mark.parametrize("name", ["flat", "step", "smooth"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_derived_cap_is_within_three_percent_of_the_best(kind, name):
    """Over 4,000 tokens, so that luck does not decide; two real answers of 96 tokens vary by more than that."""
    assert to_best(kind, name, lambda some, costs: own_cap(some, costs, LONGEST)) >= 0.97


def test_one_cap_for_all_texts_is_not():
    """The control: some cap suits each kind of text, none all of them."""
    for cap in range(1, LONGEST + 1):
        assert min(to_best(kind, "smooth", lambda some, costs, cap=cap: cap) for kind in KINDS) < 0.97


def test_rounds_that_are_sent_ahead_are_cheaper_and_others_wait_for_them():
    """Three of seven drafts stand everywhere; lookup finds five tokens, all of which stand, from the eleventh on."""
    costs = CostCurve(
        [Grid((0,), (1, 8, 16), [[0.9, 1.1, 1.3]], [0.5])],
        [DraftCost("lookup", (1, 32), (0.0, 0.0)), DraftCost("dspark", (1, 7), (-0.4, -0.4))],
    )
    found = Trace(0, {"lookup": [(5 * (at > 10), 5) for at in range(30)], "dspark": [(7, 3)] * 30})
    cap, seen = FixedCap(7), []
    observe = lambda carry, event: seen.append((event.rows[0].source, event.ahead, round(event.elapsed_ms, 3)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FixedCap, "observe", lambda self, carry, event: observe(carry, event))
        replay_all(cap, [found], costs)
        ahead, waits = ("dspark", True, 0.7), ("lookup", False, round(1.1 - 2 * 0.2 / 7, 3))
        # Behind the round for which lookup waited nothing is sent ahead: it is lookup's.
        assert seen[:6] == [("dspark", False, 1.1), ahead, ahead, ahead, waits, waits]
        seen.clear()
        patch.setattr(FixedCap, "sure", lambda self, carry: 0)
        replay_all(cap, [found], costs)
        assert not any(is_ahead for _, is_ahead, _ in seen), "the control"
        assert [ms for name, _, ms in seen if name == "dspark"] == [1.1] * 3


def test_acceptance_is_that_of_rounds_and_of_drafts_that_were_judged():
    """Rounds begin at 0, 3 and 4: two stood, none, one."""
    judged = [(2, 2), (2, 9), (2, 9), (2, 0), (2, 1), (2, 9)]
    assert acceptance([Trace(0, {"dspark": judged})], 2) == {"dspark": (1.0, (2 / 3, 1 / 2))}
    found = acceptance([Trace(0, {"lookup": [(3, 1), (0, 0), (0, 0)], "dspark": [(2, 2)] * 3})], 2)
    assert found == {"lookup": (0.5, (1.0, 0.0)), "dspark": (0.5, (1.0, 1.0))}


def test_stored_traces_replay_alike(tmp_path):
    some, costs = [trace("chat", 200), trace("chat", 150, seed=2)], machine("smooth")
    found = row(some, costs, 3)
    path = tmp_path / "traces.json"
    path.write_text(json.dumps({"curve": costs.to_dict(), "replays": {"chat": to_dict(found, some)}}))
    kinds, curve = stored_traces(str(path))
    assert kinds == {"chat": some}
    assert row(kinds["chat"], curve, 3) == found
    assert row(kinds["chat"], machine("flat"), 3) != found, "the control: another curve, other figures"


def test_answers_in_a_row_are_sessions_of_one_engine(monkeypatch):
    """One order of one answer each: two sessions, the second of which knows what the first one learned."""
    monkeypatch.setattr(cap_replays, "ORDERS", 1)
    monkeypatch.setattr(cap_replays, "BEGINNINGS", 1)
    monkeypatch.setattr(cap_replays, "AT_ONCE", 1)
    costs, kinds = machine("step"), {"chat": [trace("chat", 150)], "code": [trace("code", 150, seed=2)]}
    cap, answers = AdaptiveCap(start=3), [some[0] for some in kinds.values()]
    one = in_a_row(cap, kinds, costs, costs, 0.0)
    ms = sum(plain_ms([answer], costs) / one[name].ratio for name, answer in zip(kinds, answers, strict=True))
    assert ms == pytest.approx(replay_all(cap, answers, costs))
    assert ms != pytest.approx(sum(replay_all(cap, [answer], costs) for answer in answers)), "the control: two engines"
    assert 1 < one["chat"].accepted < one["code"].accepted
    usual, late, misled = (
        in_a_row(FixedCap(3), kinds, costs, told, waking)["chat"].ratio
        for told, waking in ((costs, 0.0), (costs, 20.0), (machine("flat"), 0.0))
    )
    assert late < usual == misled, "a fixed cap wakes once an answer, and goes by no curve"


@pytest.mark.parametrize("read", [stored_traces, stored_curve])
@pytest.mark.parametrize("text", ["", "{}", '{"replays": 3}', "[measured]"])
def test_what_is_no_such_file_is_said(tmp_path, read, text):
    path = tmp_path / "file"
    path.write_text(text)
    for wrong in (path, tmp_path / "nothing"):
        with pytest.raises(InputError, match=wrong.name) as error:
            read(str(wrong))
        assert "\n" not in str(error.value)
