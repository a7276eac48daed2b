"""What the benchmark claims of repeated runs: medians, intervals that cover, and no figure where the runs carry none."""

import math
import random
import statistics

import pytest

from dspark.bench.record import Run
from dspark.bench.stats import MIN_PAIRS, Interval, bootstrap, paired, speed_up, spread


def noisy(true, prompts, repeats, seed, noise=0.1, between=0.0):
    """Ratios that scatter round a true one: by prompt and by run."""
    dice = random.Random(seed)
    made = []
    for _ in range(prompts):
        own = math.log(true) + dice.gauss(0, between)
        made.append([math.exp(own + dice.gauss(0, noise)) for _ in range(repeats)])
    return made


def test_medians_and_quartiles():
    assert spread([]) is None
    assert spread([3.0]) == (3.0, 3.0, 3.0, 1)
    assert spread([4, 1, 3, 2, 5]) == (3, 2, 4, 5)
    assert spread([1, 2, 3, 4]) == (2.5, 1.75, 3.25, 4)
    values = [random.Random(1).random() for _ in range(101)]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    found = spread(values)
    assert (found.low, found.median, found.high) == pytest.approx((low, middle, high), rel=1e-12)


def test_pairs_stand_side_by_side():
    assert paired([[2.0, 3.0], [8.0]], [[1.0, 2.0], [4.0]]) == [[2.0, 1.5], [2.0]]
    assert paired([[2.0, None], [None]], [[1.0, 2.0], [4.0]]) == [[2.0]]
    with pytest.raises(ValueError, match="shorter"):
        paired([[1.0, 2.0]], [[1.0]])


def test_the_ratio_is_the_geometric_mean_of_the_prompts_medians():
    found = bootstrap([[1.0, 2.0, 50.0], [8.0, 8.0, 8.0]])
    assert found.ratio == pytest.approx(4.0, rel=1e-12)
    assert (found.pairs, found.prompts) == (6, 2)
    assert bootstrap([]) is None


def test_equal_ratios_leave_no_doubt_and_seeds_repeat():
    assert bootstrap([[1.5] * 5] * 4) == pytest.approx(Interval(1.5, 1.5, 1.5, 20, 4), rel=1e-12)
    ratios = noisy(1.3, 6, 5, 3)
    assert bootstrap(ratios) == bootstrap(ratios)
    assert bootstrap(ratios, seed=1) != bootstrap(ratios)


def test_the_interval_turns_round_with_the_arms():
    ratios = noisy(1.4, 6, 5, 8)
    there, back = bootstrap(ratios, seed=5), bootstrap([[1 / r for r in prompt] for prompt in ratios], seed=5)
    assert back.ratio == pytest.approx(1 / there.ratio, rel=1e-12)
    assert (back.low, back.high) == pytest.approx((1 / there.high, 1 / there.low), rel=0.02)


@pytest.mark.parametrize(("noise", "between"), [(0.1, 0.0), (0.1, 0.3), (0.4, 0.1)])
def test_the_interval_covers_the_truth(noise, between):
    """Of 100 experiments. A percentile bootstrap of eight prompts covers a little less than it says: 85 must do."""
    hits = 0
    for seed in range(100):
        found = bootstrap(noisy(1.7, 8, 5, seed, noise, between), draws=100)
        hits += found.low <= 1.7 <= found.high
    assert 85 <= hits <= 100


def test_an_interval_that_ignores_prompts_is_caught():
    """Negative control: with all runs thrown together, or each prompt taken as given, prompts that differ are not seen."""
    hits = 0
    for seed in range(100):
        ratios = noisy(1.7, 8, 5, seed, noise=0.02, between=0.3)
        fixed = [bootstrap([prompt], draws=30) for prompt in ratios]
        low, high = (math.exp(statistics.mean(math.log(getattr(f, end)) for f in fixed)) for end in ("low", "high"))
        hits += low <= 1.7 <= high
    assert hits < 85


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([], "nothing was measured on both sides"),
        ([[2.0, 2.1]], f"2 pairs of runs are too few, {MIN_PAIRS} are needed"),
        (noisy(1.0, 6, 5, 1), "no difference that these runs can show"),
        (noisy(1.05, 6, 5, 1, noise=0.5), "no difference that these runs can show"),
        (noisy(6.0, 5, 5, 1, between=0.9), "too wide for a figure"),
    ],
)
def test_a_speed_up_without_a_meaning_is_refused(ratios, said):
    found = speed_up(ratios)
    assert found.refused is not None
    assert said in found.refused


def test_what_is_too_wide_says_the_bound_that_it_has():
    assert speed_up(noisy(6.0, 5, 5, 1, between=0.9)).refused.startswith("at least")
    assert speed_up(noisy(0.1, 5, 5, 1, between=0.9)).refused.startswith("at most")


def test_a_speed_up_with_a_meaning_is_given():
    found = speed_up(noisy(1.5, 6, 5, 1, noise=0.05))
    assert found.refused is None
    assert found.interval.low < 1.5 < found.interval.high


def test_no_effect_is_hardly_ever_taken_for_one():
    """Arms that are the same, 100 times: a figure in at most one of eight, where one in twenty is what the level says."""
    false = sum(speed_up(noisy(1.0, 6, 5, seed), draws=100).refused is None for seed in range(100))
    assert false <= 12


# ---- what a run says --------------------------------------------------------------------------------------------------


def test_rates_leave_the_first_delivery_out_of_decoding():
    run = Run((1,) * 10, ((2.0, 3), (3.0, 4), (4.0, 3)), 4.5, 3, 7)
    assert run.first_s == 2.0
    assert run.decode_rate == 7 / 2.0
    assert run.whole_rate == 10 / 4.0
    assert run.accepted_length == 10 / 3


def test_a_run_that_came_at_once_has_no_decoding_rate():
    assert Run((1, 2), ((0.5, 2),), 0.6).decode_rate is None
    assert Run((), (), 0.1) == Run((), (), 0.1, None, None)
    empty = Run((), (), 0.1)
    assert (empty.first_s, empty.decode_rate, empty.whole_rate, empty.accepted_length) == (None,) * 4
