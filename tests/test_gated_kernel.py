"""The text of the gated delta kernel computes the rule, run on the CPU through stand-ins (tests/shim), and a row's bits do not
depend on what came with it."""

import mlx.core as mx
import pytest

from dspark.kernels import gated, gated_probe
from dspark.kernels.gated import Gated
from tests.gated_kernel import launch_by

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
# Heads of k and v, columns of k and v, a gate for each column, number formats of q, of the gates, of beta.
CASES = [
    Gated(2, 4, 64, 32, False, BF16, F32, BF16),
    Gated(1, 1, 256, 64, True, F16, F32, F16),
    Gated(2, 2, 32, 96, False, F32, F32, F32),
    Gated(1, 2, 96, 32, True, BF16, BF16, F32),
]
PLAIN = Gated(2, 2, 32, 32, False, BF16, F32, BF16)


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    monkeypatch.setattr(gated, "launch", launch_by())


def same(a, b):
    return mx.array_equal(a, b).item()


# The probe compares outputs and states with float32 arithmetic, with a mask and without one, and a state rebuilt at a row with
# the one that was there; its tolerances say why they are what they are.


@pytest.mark.parametrize("kind", CASES, ids=str)
def test_the_rule_is_float32s(kind):
    assert gated_probe.error(kind, 2, 5) <= 1


@pytest.mark.parametrize("kind", CASES[:2], ids=str)
def test_a_row_has_the_same_bits_whatever_came_with_it(kind):
    given = gated_probe.drawn(kind, 1, 4)
    y, state = gated.update(kind, *given)
    now, single = given.state, []
    for t in range(4):
        out, now = gated.update(kind, *(a[:, t : t + 1] for a in given[:-1]), now)
        single.append(out)
    assert same(mx.concatenate(single, axis=1), y)
    assert same(now, state)
    for keep in range(5):
        want = given.state if keep == 0 else gated.update(kind, *(a[:, :keep] for a in given[:-1]), given.state)[1]
        assert same(gated.state_behind(kind, *given[1:], None, [keep]), want)


def test_a_mask_that_was_given_still_counts_when_rows_are_dropped():
    given = gated_probe.drawn(PLAIN, 2, 4)
    mask = mx.array([[False, True, True, True], [True, True, False, True]])
    rebuilt = gated.state_behind(PLAIN, *given[1:], mask, [3, 2])
    both = mx.array([[False, True, True, False], [True, True, False, False]])
    assert same(rebuilt, gated.update(PLAIN, *given, both)[1])
    assert not same(rebuilt, gated.state_behind(PLAIN, *given[1:], None, [3, 2]))


def test_masked_outputs_are_zero():
    given = gated_probe.drawn(PLAIN, 1, 3)
    y, _ = gated.update(PLAIN, *given, mx.array([[True, False, True]]))
    assert not y[:, 1].any().item()
    assert y[:, 0].any().item()


BROKEN = {
    "no decay": ("state[r][i] = mul(state[r][i], row.g[VECTOR ? i : 0]);", ""),
    "the first lane's columns alone": ("for (int distance = 16; distance > 0", "for (int distance = 8; distance > 0"),
    "another head's keys": ("head / (job.heads / job.key_heads)", "0"),
    "the gates of another head": ("at.head * job.g.s2", "0"),
    "a row too late": ("fetch(next, job, at, t + 1)", "fetch(next, job, at, t)"),
    "no beta": ("-total(sums[r])), row.beta)", "-total(sums[r])), 1.0f)"),
    "another row's value": ("(at.row + r) * job.v.s3", "at.row * job.v.s3"),
    "a mask that is not looked at": ("if (MASKED) {", "if (false) {"),
    "counts that are not looked at": ("if (COUNTED && job", "if (false && job"),
    "views taken for whole arrays": ("t * job.k.s1", "t * job.key_heads * DK"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_caught(monkeypatch, name):
    right, wrong = BROKEN[name]

    def broken(text):
        assert right in text[0], "the text changed; break it in another way"
        return text[0].replace(right, wrong), text[1]

    monkeypatch.setattr(gated, "launch", launch_by(broken))
    assert not gated_probe.error(PLAIN, 2, 5) <= 20


def test_shapes_that_are_not_written_say_why():
    for kind, word in (
        (PLAIN._replace(dk=48), "48 columns"),
        (PLAIN._replace(dv=288), "288 columns"),
        (PLAIN._replace(keys=3), "multiple of 3"),
        (PLAIN._replace(x=mx.int32), "int32 input"),
    ):
        assert word in gated.why_not(kind)


# ---- the probe ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def took(monkeypatch):
    def set_to(step, eight):
        monkeypatch.setattr(gated_probe, "timed", lambda kind, length: {1: step, 8: eight}[length])

    return set_to


def test_a_right_and_faster_kernel_is_taken(took):
    took((10.0, 40.0), (20.0, 300.0))
    found = gated_probe.measure(PLAIN)
    assert (found.way, found.us, found.stock_us, found.why) == ("cuda", 20.0, 300.0, "")
    assert found.worst <= 1


@pytest.mark.parametrize(
    ("step", "eight", "word"),
    [((10.0, 40.0), (99.0, 100.0), "99 us for 8 rows"), ((50.0, 40.0), (20.0, 300.0), "50 us for one")],
    ids=["no faster for a block", "slower for a step"],
)
def test_a_slower_one_is_not(took, step, eight, word):
    took(step, eight)
    found = gated_probe.measure(PLAIN)
    assert found.way == "stock"
    assert word in found.why


def test_a_wrong_one_is_not_and_neither_is_one_that_does_not_start(took, monkeypatch):
    took((1.0, 40.0), (1.0, 300.0))
    monkeypatch.setattr(gated, "launch", launch_by(lambda text: (text[0].replace("-total(", "total("), text[1])))
    assert "wrong on this machine" in gated_probe.measure(PLAIN).why

    def refused(*call):
        raise RuntimeError("cudaGraphInstantiate failed: too many resources requested for launch")

    monkeypatch.setattr(gated, "launch", refused)
    found = gated_probe.measure(PLAIN)
    assert found.way == "stock"
    assert "too many resources" in found.why


def test_the_clock_times_both():
    assert all(us > 0 for us in gated_probe.timed(PLAIN, 1))
