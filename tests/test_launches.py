"""Launches are turned on where a probe finds them right and faster; what was found is kept, said and taken off again."""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from dspark.kernels import launches, stack, store
from dspark.kernels.launches import Launches
from dspark.kernels.measure import Finding
from dspark.models.target import Target
from tests import launched
from tests import stack_trials as trials

CASE = trials.Case(llama, mx.float16, tied=True, warps=2, splits=2, blocks=3)


@pytest.fixture
def to():
    return Target(trials.target(CASE))


@pytest.fixture
def forward(to):
    made = stack.Forward(to.core, stack.study(to.core)._replace(warps=2, splits=2), 3)
    made.kernel = lambda rows, tapped: (
        kind := made.stack._replace(tapped=tapped, cols=1 if rows <= 8 else 2),
        trials.compiled(kind),
    )
    return made


def clock(monkeypatch, *took):
    """Ways take so many microseconds a step, whatever they do."""
    monkeypatch.setattr(launches, "_timed", lambda caches, first, *ways: list(took))


def test_a_right_forward_is_turned_on_where_it_is_faster(to, forward, monkeypatch):
    clock(monkeypatch, 500.0, 4000.0)
    found = launches._measure_forward(to, forward)
    assert (found.way, found.us, found.stock_us) == ("cuda", 500.0, 4000.0)
    assert 0 < found.worst <= 1


def test_a_slower_forward_stays_off(to, forward, monkeypatch):
    clock(monkeypatch, 4000.0, 4000.0)
    found = launches._measure_forward(to, forward)
    assert found.way == "stock"
    assert "4,000 us a step" in found.why


@pytest.mark.parametrize("times", [1.1, float("nan")])
def test_a_wrong_forward_stays_off(to, forward, monkeypatch, times):
    clock(monkeypatch, 500.0, 4000.0)
    forward._vectors = forward._vectors * times
    found = launches._measure_forward(to, forward)
    assert found.way == "stock"
    assert found.why.startswith("wrong on this machine")


def test_a_round_is_compared_with_float32():
    to = launched.target()
    head = launched.head(to, launched.plain())
    made = head.launch
    assert launches._measure_round(to, head, made).way == "cuda"
    made._fixed[0] = made._fixed[0] * 0
    wrong = launches._measure_round(to, head, made)
    assert wrong.way == "stock"
    assert "drafts are float32's" in wrong.why


def test_findings_are_kept(tmp_path):
    file, asked = tmp_path / "kernels.json", []

    def measured():
        asked.append(1)
        return Finding("cuda", 0, 1.0, 2.0)

    assert launches._found("forward", measured, False, file) is None
    assert launches._found("forward", measured, True, file) == Finding("cuda", 0, 1.0, 2.0)
    assert launches._found("forward", measured, True, file) == store.read(file)["forward"]
    assert len(asked) == 1


def test_what_breaks_while_it_is_measured_is_a_reason(tmp_path):
    def broken():
        raise RuntimeError("no such kernel\nsecond line")

    found = launches._found("forward", broken, True, tmp_path / "kernels.json")
    assert (found.way, found.why) == ("stock", "RuntimeError: second line")


def test_closing_takes_all_off():
    target, head = SimpleNamespace(launch=None), SimpleNamespace(launch=None)
    made = Launches(target)
    assert not made.on
    made.put(target, "forward")
    made.put(head, "round")
    assert (made.on, target.launch, head.launch) == (True, "forward", "round")
    made.close()
    made.close()
    assert (made.on, target.launch, head.launch) == (False, None, None)


def test_lines_say_what_is_on_and_why_not():
    made = Launches(SimpleNamespace(launch=None))
    made.findings |= {"forward": Finding("cuda", 0, 520.0, 3600.0), "round": Finding("stock", why="a dflash drafter")}
    assert made.lines() == ["forward: one launch (520 us for 3,600)", "round: MLX's own (a dflash drafter)"]


def test_other_devices_have_none(to):
    assert launches.enable(to) is None
