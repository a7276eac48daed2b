"""The cost curve says what was measured and nothing wild between, and `best_cap` finds what trying everything would find."""

import random
import tomllib
from itertools import pairwise

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.caps.curve import CostCurve, DraftCost, Grid, line, nominal
from dspark.caps.price import MAX_OWED, best_cap, choices, expected_tokens, price_list, round_ms, speed_ups
from dspark.errors import InputError
from tests.simulated import machine

MS = st.floats(0.5, 100, allow_nan=False)


@st.composite
def curves(draw) -> CostCurve:
    """Random curves: nothing about them is monotone."""
    widths = [1, *sorted(draw(st.sets(st.integers(2, 24), min_size=1, max_size=8)))]
    row = lambda: [draw(MS) for _ in widths]
    grid = Grid((100, 5000), widths, [row(), row()], [draw(MS), draw(MS)])
    caps = range(1, draw(st.integers(1, 12)) + 1)
    drafts = [DraftCost("dspark", caps, [draw(st.floats(0, 20)) for _ in caps])] if draw(st.booleans()) else []
    return CostCurve(
        [grid],
        drafts,
        host_ms=draw(st.floats(0, 5)),
        replay_ms=draw(st.sampled_from([0.0, 3.0])),
        refeeds=draw(st.booleans()),
        fixed_widths=draw(st.booleans()),
    )


RATES = st.lists(st.floats(0, 1), min_size=1, max_size=8)


def brute_force(costs: CostCurve, rates: list[float], depth: float, source: str) -> float:
    """The best tokens a millisecond over every cap and width that may be used, by the definition of each price."""
    prices = price_list(costs, depth, source)
    best = 1.0 / costs.plain_at(depth)
    widths = costs.grids[0].widths if costs.fixed_widths else range(1, costs.widest + 1)
    for cap in range(1, min(costs.longest(source), costs.widest - 1) + 1):
        tokens = 1.0 + sum(_all(rates, i) for i in range(1, cap + 1))
        for width in widths:
            if width > cap:
                best = max(best, tokens / round_ms(prices, rates, cap, width))
    return best


def _all(rates: list[float], n: int) -> float:
    product = 1.0
    for i in range(n):
        product *= rates[min(i, len(rates) - 1)]
    return product


@settings(deadline=None, max_examples=300)
@given(curves(), RATES, st.floats(0, 20000), st.sampled_from(["dspark", "lookup"]))
def test_best_cap_is_never_beaten(costs, rates, depth, source):
    choice = best_cap(costs, rates, depth, source)
    # Sums in another order: a few units in the last place.
    assert choice.rate >= brute_force(costs, rates, depth, source) * (1 - 1e-12)
    assert choice.cap == 0 or choice.width > choice.cap
    assert choice.tokens == pytest.approx(expected_tokens(rates, choice.cap), rel=1e-12)


def test_a_search_that_stops_at_the_first_rise_is_beaten():
    """The control: over a curve that falls again, climbing from cap 1 while it pays ends too early."""
    costs = machine("knee")
    rates, prices = (0.8,), price_list(machine("knee"), 0, "dspark")
    exact = [(1 + cap, round_ms(prices, rates, cap, cap + 1)) for cap in range(8)]
    climbed = next(
        cap
        for cap in range(1, 7)
        if expected_tokens(rates, cap + 1) / exact[cap + 1][1] < expected_tokens(rates, cap) / exact[cap][1]
    )
    assert best_cap(costs, rates, 0, "dspark").rate > 1.1 * expected_tokens(rates, climbed) / exact[climbed][1]


def test_a_verify_is_padded_where_a_wider_one_is_cheaper():
    costs = machine("knee", fixed_widths=True)
    choice = best_cap(costs, (0.7,), 0, "dspark", most=5)
    assert choice.cap == 5
    assert choice.width == 12
    smooth = best_cap(machine("smooth", fixed_widths=True), (0.7,), 0, "dspark")
    assert smooth.width == smooth.cap + 1


def test_no_draft_pays_where_rows_cost_what_steps_cost():
    assert best_cap(machine("linear"), (0.95,), 0, "dspark").cap == 0


def test_expected_tokens_counts_the_bonus():
    assert expected_tokens((0.5, 0.25), 0) == 1
    assert expected_tokens((0.5, 0.25), 3) == 1 + 0.5 + 0.125 + 0.125 * 0.25


@pytest.mark.parametrize(
    ("rates", "cap", "width"), [((0.6, 0.8), 3, 4), ((0.9,), 5, 6), ((0.7,), 3, 8), ((0.0,), 2, 3)]
)
def test_the_price_of_feeding_again_is_what_a_simulated_debt_costs(rates, cap, width):
    """Play rejections by the buffers' rule (kept rows go in front of the next block; beyond the bound they are paid) and
    compare. 40,000 rounds: the mean's error is below 1 %; the formula rounds the bound to whole rejections: 5 %."""
    grid = Grid((0,), range(1, 41), [[10.0 + w for w in range(1, 41)]], [10.0])
    costs = CostCurve([grid], refeeds=True)
    rng, owed, total = random.Random(5), 0, 0.0
    for _ in range(40_000):
        if owed > MAX_OWED:
            total += 10.0 + owed
            owed = 0
        total += 10.0 + width + owed
        accepted = 0
        while accepted < cap and rng.random() < rates[min(accepted, len(rates) - 1)]:
            accepted += 1
        owed = 0 if accepted + 1 == width else owed + accepted + 1
    expected = round_ms(price_list(costs, 0), rates, cap, width)
    assert expected == pytest.approx(total / 40_000, rel=0.05)
    assert expected > 1.05 * (10.0 + width) or rates == (0.9,), "the debt must show in the price"


def test_replay_is_paid_by_rejections_only():
    plain = CostCurve([Grid((0,), (1, 4, 8), [[10, 12, 12]], [10])])
    replay = CostCurve([Grid((0,), (1, 4, 8), [[10, 12, 12]], [10])], replay_ms=4.0)
    extra = lambda rates, width: (
        round_ms(price_list(replay, 0), rates, 3, width) - round_ms(price_list(plain, 0), rates, 3, width)
    )
    assert extra((1.0,), 4) == 0
    assert extra((0.5,), 4) == pytest.approx(4.0 * (1 - 0.125), rel=1e-12)
    assert extra((1.0,), 8) == pytest.approx(4.0, rel=1e-12), "padding is rejected every round"


def test_depth_moves_the_best_cap():
    """Where deep context makes rows dear, fewer are worth it."""
    grid = Grid((0, 10_000), (1, 2, 4, 8), [[10, 10.5, 11, 12], [20, 26, 40, 70]], [10, 20])
    costs = CostCurve([grid])
    caps = [best_cap(costs, (0.7,), depth).cap for depth in (0, 4_000, 10_000, 40_000)]
    assert caps[0] == 7
    assert all(a >= b for a, b in pairwise(caps))
    assert caps[-1] <= 1


def test_lines_pass_through_what_was_measured_and_never_fall_behind_it():
    xs, ys = (1, 2, 8, 9), (5.0, 9.0, 4.0, 3.0)
    assert [line(xs, ys, x) for x in xs] == list(ys)
    assert line(xs, ys, 5) == 6.5
    assert line(xs, ys, 0) == 5.0
    assert line(xs, ys, 100) == 3.0
    assert line((1, 2), (1.0, 3.0), 4) == 7.0


def test_batches_interpolate_and_rows_count_alike_where_one_was_measured():
    one, four = Grid((0,), (1, 2, 4, 8), [[10, 11, 13, 17]], [10]), Grid((0,), (1, 2), [[16, 22]], [16], batch=4)
    assert CostCurve([one]).verify_at(2, 0, batch=4) == 17
    assert CostCurve([one]).plain_at(0, batch=4) == 13
    assert CostCurve([one, four]).verify_at(2, 0, batch=4) == 22
    assert CostCurve([one, four]).verify_at(1, 0, batch=2) == 12
    assert CostCurve([one, four]).plain_at(0, batch=2) == 12


def test_knees_are_named():
    steps = CostCurve([Grid((0,), (1, 2, 3, 4, 5, 6), [[10, 10.2, 10.4, 14, 14.3, 14.6]], [10])])
    assert [str(k) for k in steps.knees()] == ["dearer at 4 rows (+35 %)"]
    assert machine("flat").knees() == ()
    knee = machine("knee").knees()
    assert [k.width for k in knee] == [2, 8]
    assert str(knee[-1]) == "cheaper at 8 rows (-37 %)"
    assert nominal(10.0).knees() == nominal(10.0).knees(0)


def test_the_floor_says_how_far_off_a_plain_step_is():
    assert machine("knee", floor_ms=2.0).over_floor() == 9.1 / 2.0
    assert machine("knee").over_floor() is None


def test_speed_ups_rise_with_acceptance():
    table = speed_ups(machine("knee"), 0, "dspark")
    assert [rate for rate, _, _ in table] == [0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
    assert all(a[2] <= b[2] for a, b in pairwise(table))
    assert table[0][2] == pytest.approx(1.0, rel=1e-12)
    assert table[-1][2] > 2


def test_cap_zero_costs_the_step_that_cannot_be_sent_ahead():
    prices = price_list(machine("knee"), 0, "dspark")
    assert choices(prices, (0.5,))[0].ms == prices.verify[0] + prices.host
    assert best_cap(machine("knee"), (0.0,), 0, "dspark").ms == prices.plain


@settings(deadline=None, max_examples=50)
@given(curves())
def test_a_curve_survives_toml(costs):
    """Times keep four digits, so a second trip changes nothing."""
    once = CostCurve.from_dict(tomllib.loads(tomli_w.dumps(costs.to_dict())))
    assert CostCurve.from_dict(tomllib.loads(tomli_w.dumps(once.to_dict()))) == once
    assert once.grids[0].widths == costs.grids[0].widths
    assert once.verify_at(1, 100) == pytest.approx(costs.verify_at(1, 100), rel=1e-3)


GOOD = {"grids": [{"depths": [0], "widths": [1, 2], "verify_ms": [[1.0, 2.0]], "plain_ms": [1.0]}]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"grids": []}, "at least one"),
        ({"grids": 3}, "costs.grids"),
        ({"speed": 3}, "costs.speed is unknown"),
        ({"host_ms": -1.0}, "host_ms"),
        ({"host_ms": "fast"}, "costs"),
        ({"grids": [GOOD["grids"][0] | {"widths": [2, 3]}]}, "begin with 1"),
        ({"grids": [GOOD["grids"][0] | {"widths": [1, 1]}]}, "rising"),
        ({"grids": [GOOD["grids"][0] | {"widths": [1, 2.5]}]}, "whole"),
        ({"grids": [GOOD["grids"][0] | {"verify_ms": [[1.0]]}]}, "verify_ms"),
        ({"grids": [GOOD["grids"][0] | {"verify_ms": [[1.0, float("nan")]]}]}, "positive"),
        ({"grids": [GOOD["grids"][0] | {"plain_ms": []}]}, "plain_ms"),
        ({"grids": [{"depths": [0]}]}, "costs.grids[0]"),
        ({"grids": ["fast"]}, "costs.grids[0]"),
        ({"drafts": [{"source": "x", "caps": [1, 2], "ms": [1.0]}]}, "one a cap"),
        ({"drafts": [{"source": "x", "caps": [1], "ms": [1.0], "rates": [1.5]}]}, "rates"),
        ({"drafts": [{"source": "x", "caps": [1], "ms": [float("inf")]}]}, "ms holds inf"),
        ({"drafts": [{"source": "x", "caps": [1], "ms": [-9.0]}]}, "no time"),
    ],
)
def test_a_damaged_curve_is_refused_in_one_sentence(change, says):
    assert CostCurve.from_dict(GOOD).plain_at(0) == 1.0
    with pytest.raises(InputError, match=None) as error:
        CostCurve.from_dict(GOOD | change)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
