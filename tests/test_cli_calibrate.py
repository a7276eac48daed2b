"""Calibration as a user meets it: at the first run, by hand, in words; never over a fixed cap, never half-written."""

import json
import subprocess
import sys
from types import SimpleNamespace

import attrs
import pytest

import dspark
import dspark.assemble
from dspark.calibrate import measure as measure_module
from dspark.calibrate import timing as timing_module
from dspark.calibrate.apply import apply, asked_of, told, with_stored
from dspark.calibrate.identity import identity_of
from dspark.calibrate.record import Calibration, Identity, facts
from dspark.calibrate.store import Store
from dspark.caps import AdaptiveCap, ClipCap, FixedCap
from dspark.cli import main
from dspark.engine import bind
from dspark.errors import InputError
from dspark.pipeline import chain
from dspark.platform import machine as this_machine
from dspark.recipe import loads
from dspark.stages.accept import Greedy
from dspark.stages.draft import Lookup, NoDraft
from dspark.stages.prefill import Prefill
from dspark.stages.rollback import RollbackAuto
from dspark.stages.verify import Verify
from tests.cli_fake import fake_assemble
from tests.fakes import HashTarget
from tests.simulated import machine
from tests.test_cli import ANSWER, ROOT, assert_one_sentence

WHO = Identity("llama", "dspark 7", "none", "mlx", "float32")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and measurements that take no time and find a quiet machine, whatever runs beside."""
    monkeypatch.setenv("DSPARK_CALIBRATION_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(measure_module.BUDGET_S, "cpu", 0.01)
    for bound in ("NOISY", "THROTTLED"):
        monkeypatch.setattr(timing_module, bound, 1e9)
    return tmp_path / "cache"


@pytest.fixture
def run(cache, capfd, monkeypatch):
    """Run a command line on a target that says ANSWER: exit code, standard output and standard error."""
    monkeypatch.setattr(dspark.assemble, "assemble", fake_assemble(ANSWER))

    def call(*args):
        code = main(list(args))
        out, err = capfd.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return call


@pytest.fixture
def never(monkeypatch):
    """From when it is called on, nothing may be measured."""

    def forbid():
        monkeypatch.setattr("dspark.calibrate.calibrator.measure", lambda *a, **k: pytest.fail("measured"))

    return forbid


def calibration(start=None, asked="", identity=WHO) -> Calibration:
    changes = {} if start is None else {"cap": {"start": start}}
    return Calibration(facts(this_machine()), identity, machine("knee"), "2026-08-30", 9.0, (), changes, asked)


def files(cache) -> list[str]:
    return [path.name for path in cache.rglob("*.toml*")]


def engine_of(cap=None, draft=None):
    return bind(
        chain(Prefill(), draft or Lookup(), Verify(), Greedy(), RollbackAuto(), cap=cap or AdaptiveCap()), HashTarget()
    )


# ---- the first run --------------------------------------------------------------------------------------------------


def test_the_first_run_measures_and_the_second_reads(run, cache, never):
    first = run("run", "lookup", "hi")
    assert (first.code, first.out) == (0, ANSWER + "\n")
    assert "first run of this recipe here" in first.err
    assert "--no-calibrate" in first.err
    (name,) = files(cache)
    assert name.startswith("lookup-")
    never()
    second = run("run", "lookup", "hi")
    assert second.out == first.out
    assert "measur" not in second.err


def test_a_second_measurement_is_caught(run, never):
    """The control: without a file the second run would measure."""
    never()
    assert run("run", "lookup", "hi").code == 1


def test_a_disturbed_calibration_is_measured_again_by_the_next_run(run, cache, never, monkeypatch):
    monkeypatch.setattr(timing_module, "NOISY", -1.0)
    assert "not quiet" in run("run", "lookup", "hi").err
    (path,) = cache.rglob("*.toml")
    assert "disturbed = true" in path.read_text()
    skipped = run("run", "lookup", "hi", "--no-calibrate")
    assert "measur" not in skipped.err
    monkeypatch.setattr(timing_module, "NOISY", 1e9)
    again = run("run", "lookup", "hi")
    assert (again.code, again.out) == (0, ANSWER + "\n")
    assert "the machine was disturbed when it was calibrated: measuring again" in again.err
    assert "first run" not in again.err
    assert "disturbed = false" in path.read_text()
    never()
    assert "measur" not in run("run", "lookup", "hi").err


@pytest.mark.parametrize("args", [["--no-calibrate"], ["--cap", "5"], ["--plain"], ["--set", "cap=3"]])
def test_nothing_is_measured_where_nothing_would_come_of_it(run, cache, never, args):
    never()
    done = run("run", "lookup", "hi", *args)
    assert (done.code, done.out) == (0, ANSWER + "\n")
    assert not cache.exists()


def test_a_batch_measures_its_own_width(run, cache, tmp_path):
    (tmp_path / "prompts.txt").write_text("hi\nhi\n")
    done = run("run", "lookup", "--file", str(tmp_path / "prompts.txt"), "--batch", "2")
    assert done.code == 0
    assert [json.loads(line)["text"] for line in done.out.splitlines()] == [ANSWER, ANSWER]
    (path,) = cache.rglob("*.toml")
    assert path.read_text().count("[[measured.costs.grids]]") == 2


def test_a_cache_that_cannot_be_written_is_said_and_the_run_goes_on(run, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSPARK_CALIBRATION_CACHE", str(tmp_path / "file"))
    done = run("run", "lookup", "hi")
    assert (done.code, done.out) == (0, ANSWER + "\n")
    assert "set DSPARK_CALIBRATION_CACHE to a folder of yours" in done.err


def test_a_broken_file_is_set_aside_and_said(run, cache):
    run("run", "lookup", "hi")
    (path,) = cache.rglob("*.toml")
    path.write_text(path.read_text().replace("widths = [1,", "widths = [2,"))
    done = run("run", "lookup", "hi")
    assert "set aside" in done.err
    assert sorted(files(cache)) == [path.name, f"{path.name}.broken"]


def test_an_interrupt_while_measuring_leaves_nothing(run, cache, monkeypatch):
    def interrupt(*args, **how):
        raise KeyboardInterrupt

    monkeypatch.setattr("dspark.calibrate.calibrator.measure", interrupt)
    for command in (["run", "lookup", "hi"], ["calibrate", "lookup", "--target", "x"]):
        done = run(*command)
        assert (done.code, done.out) == (130, "")
        assert done.err.endswith("dspark: interrupted\n")
    assert files(cache) == []


def test_the_changed_cap_is_reported(run, cache, monkeypatch):
    """A drafter of its own is what a cap follows for; here its calibration is put into the store."""
    engine = fake_assemble(ANSWER)(dspark.load("lookup"))
    Store(cache).save(calibration(3, identity=identity_of(engine)), this_machine(), "lookup")
    done = run("run", "lookup", "hi", "--json", "--set", "cap.start=4")
    (first, second) = json.loads(done.out)["changes"]
    assert first["key"] == "cap.start"
    assert (second["key"], second["old"], second["new"]) == ("cap.start", 4, 3)
    assert "2026-08-30" in second["source"]
    assert ".toml" in second["source"]


# ---- by hand --------------------------------------------------------------------------------------------------------

CALIBRATE = ("calibrate", "lookup", "--target", "some/where")


def test_calibrate_prints_curves_cap_knee_and_speed_ups(run, cache, tmp_path):
    done = run(*CALIBRATE, "--plot", str(tmp_path / "curves.svg"))
    assert done.code == 0
    for word in (
        "verify, ms by rows",
        "256 tokens of context",
        "4,096 tokens",
        "lookup",
        "cap  ",
        "knee",
        "floor",
        "0.95",
    ):
        assert word in done.out
    assert str(cache) in done.out.replace("\n            ", "")
    assert "\x1b" not in done.out
    assert max(map(len, done.out.splitlines())) <= 100
    picture = (tmp_path / "curves.svg").read_text()
    assert picture.startswith("<svg")
    assert "verify" in picture


def test_show_prints_the_same_and_loads_nothing(run, monkeypatch):
    measured = run(*CALIBRATE)
    monkeypatch.setattr(dspark.assemble, "assemble", lambda *a, **k: pytest.fail("loaded"))
    assert run(*CALIBRATE, "--show").out == measured.out


def test_show_finds_a_renamed_recipe_by_what_it_is(run, tmp_path, never):
    run(*CALIBRATE)
    never()
    (tmp_path / "mine.toml").write_text('schema = 1\ntarget.source = "moved/away"\ndraft.kind = "lookup"\n')
    assert "verify, ms by rows" in run("calibrate", str(tmp_path / "mine.toml"), "--show").out


def test_by_hand_it_is_measured_again(run, cache):
    run(*CALIBRATE, "--quick")
    (path,) = cache.rglob("*.toml")
    quick = path.read_text()
    run(*CALIBRATE)
    assert files(cache) == [path.name]
    assert path.read_text() != quick


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--show"], "nothing is stored for lookup on this machine; dspark calibrate lookup measures it"),
        (["--show", "--quick"], "--show measures nothing; drop --quick"),
        (["--plot", "x.png"], "--plot x.png: the plot is an SVG; give a name that ends in .svg"),
        (["--plot", "/nowhere/x.svg"], "--plot /nowhere/x.svg: /nowhere is no folder that can be written to"),
        (["--batch", "0"], "--batch is 0; it must be a whole number of at least 1"),
        (
            ["--set", "draft.kind=none"],
            "recipes/lookup.toml: this recipe never drafts, so there is nothing to calibrate",
        ),
    ],
)
def test_mistakes_are_one_sentence(run, args, said):
    done = run(*CALIBRATE, *args)
    assert done.code == 2
    assert said in done.err.splitlines()[-1]
    assert_one_sentence(done.err.splitlines()[-1])


# ---- words ----------------------------------------------------------------------------------------------------------

PAIR = """
schema = 1
cap = { kind = "adaptive", start = 4 }
target.source = "some/where"
draft.kind = "lookup"
"""


def test_explain_shows_the_cap_and_where_it_comes_from(run, cache, tmp_path):
    (tmp_path / "pair.toml").write_text(PAIR)
    recipe = dspark.load(tmp_path / "pair.toml")
    assert "not calibrated on this machine" in run("explain", recipe.path).out
    path = Store(cache).save(calibration(3, asked_of(recipe)), this_machine(), "pair")
    said = run("explain", recipe.path).out
    assert "cap       4 -> 3: adaptive" in said
    assert "mlx 0.32" in said
    assert "2026-08-30" in said
    assert str(path) in said


def test_explain_leaves_a_fixed_cap_alone(run, cache, tmp_path):
    (tmp_path / "pair.toml").write_text(PAIR.replace('{ kind = "adaptive", start = 4 }', "4"))
    recipe = dspark.load(tmp_path / "pair.toml")
    Store(cache).save(calibration(3, asked_of(recipe)), this_machine(), "pair")
    assert "cap       4 (pinned)" in run("explain", recipe.path).out


def test_what_a_recipe_asks_for_is_told_apart():
    asked = {asked_of(loads(text)) for text in (PAIR, PAIR.replace("where", "else"), PAIR + "draft.base = 3\n")}
    assert len(asked) == 3
    assert asked_of(loads(PAIR.replace("start = 4", "start = 5"))) in asked, "the cap is not what is measured"
    assert asked_of(loads(PAIR.replace('target.source = "some/where"', ""))) == ""


# ---- engines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cap", "now"),
    [
        (AdaptiveCap(), AdaptiveCap(start=3)),
        (AdaptiveCap(start=4), AdaptiveCap(start=3)),
        (ClipCap(AdaptiveCap(start=4), 1, 7), ClipCap(AdaptiveCap(start=3), 1, 7)),
        (FixedCap(4), FixedCap(4)),
        (ClipCap(FixedCap(4), 1, 7), ClipCap(FixedCap(4), 1, 7)),
    ],
)
def test_a_calibration_reaches_open_caps_only(cap, now):
    engine = apply(engine_of(cap), calibration(3))
    assert engine.pipeline.cap == now
    assert engine.calibration.changed == (cap != now)
    assert engine.costs == machine("knee")


def test_a_calibration_without_a_cap_leaves_it():
    assert told(AdaptiveCap(start=4), calibration(), None)[0] == AdaptiveCap(start=4)


@pytest.mark.parametrize(
    "changes", [{"cap": 3}, {"cap": {"start": -1}}, {"cap": {"start": True}}, {"cap": {"most": 3}}, {"draft": {}}]
)
def test_a_calibration_changes_the_start_alone(changes):
    with pytest.raises(InputError, match=r"cap\.start"):
        attrs.evolve(calibration(), changes=changes)


def test_bind_takes_what_is_stored_and_measures_only_when_asked(cache, never):
    pipe = chain(Prefill(), Lookup(), Verify(), Greedy(), RollbackAuto(), cap=AdaptiveCap())
    with pytest.raises(InputError, match=r"calibration is 'of'; allowed: stored, auto, off; did you mean 'off'\?"):
        dspark.bind(pipe, HashTarget(), calibration="of")
    assert dspark.bind(pipe, HashTarget(), probe=False).costs is None
    assert not cache.exists()
    measured = dspark.bind(pipe, HashTarget(), probe=False, calibration="auto")
    assert measured.costs is not None
    never()
    for mode, same in (("stored", True), ("auto", True), ("off", False)):
        engine = dspark.bind(pipe, HashTarget(), probe=False, calibration=mode)
        assert (engine.costs is not None and engine.costs.widest == measured.costs.widest) == same


def test_nothing_is_looked_up_for_engines_that_would_not_use_it(monkeypatch):
    monkeypatch.setattr(Store, "load", lambda *a: pytest.fail("looked up"))
    for engine in (engine_of(FixedCap(4)), engine_of(draft=NoDraft())):
        assert with_stored(engine) is engine
    with pytest.raises(pytest.fail.Exception):
        with_stored(engine_of())


def test_sessions_of_an_engine_learn_from_one_another():
    engine = apply(engine_of(), calibration(3))
    fresh = engine.cap_carry()
    learned = fresh._replace(rounds=99)
    engine.learn(learned)
    assert engine.cap_carry().rounds == 99
    assert attrs.evolve(engine).cap_carry().rounds == 0, "an engine made from another one begins anew"


def test_a_session_hands_on_what_its_cap_learned():
    engine = apply(engine_of(), calibration(3))
    rounds = []
    for _ in range(2):
        with engine.open([1, 2, 3], max_tokens=20) as session:
            began = session.state.cap.rounds
            for _ in session:
                pass
        rounds.append((began, session.result.rounds))
    assert rounds[0][0] == 0
    assert rounds[1][0] == rounds[0][1] > 0


def test_a_signal_while_measuring_leaves_no_file(cache):
    """A process of its own, whose forwards take 20 ms, is interrupted once it has begun to measure."""
    code = (
        # Where the tests run in the background, SIGINT comes ignored.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "import sys, tests.cli_fake as f; f.uncalibrated = __import__('dspark.cli.calibrated').cli.calibrated.calibrated; "
        "sys.argv[1:] = ['Yes.', '0.02', 'run', 'lookup', 'hi']; sys.exit(f.main())"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "first run of this recipe" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(2)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith("dspark: interrupted\n")
    assert files(cache) == []
