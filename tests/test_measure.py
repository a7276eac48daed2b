"""Measuring: the figures are those of the rounds that run, disturbed ones are noticed, nothing is left changed behind."""

import attrs
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from dspark.buffers.plan import make_plan
from dspark.calibrate import fill as fill_module
from dspark.calibrate import measure as measure_module
from dspark.calibrate.apply import stored
from dspark.calibrate.bandwidth import floor_ms, read_nbytes
from dspark.calibrate.bench import Bench, Dummy, made_up
from dspark.calibrate.calibrator import calibrate, derived_cap
from dspark.calibrate.fill import Unfillable, chunks, fill
from dspark.calibrate.identity import identity_of
from dspark.calibrate.measure import measure
from dspark.calibrate.record import RETRIES
from dspark.calibrate.store import Store
from dspark.calibrate.timing import AGAIN, LEAST, MOST, NOISY, Case, Timed, Times, _timed, time_cases
from dspark.calibrate.widths import by_worth, widths_for
from dspark.caps.curve import CostCurve
from dspark.caps.price import price_list
from dspark.engine import bind
from dspark.errors import InputError
from dspark.models.target import Target
from dspark.pipeline import chain
from dspark.stages.accept import Greedy
from dspark.stages.draft import Lookup, NoDraft, first_of
from dspark.stages.prefill import Prefill
from dspark.stages.rollback import RollbackAuto
from dspark.stages.verify import Verify
from tests import launched
from tests.fakes import HashTarget, ScriptedDraft
from tests.families import build, quantized


def engine_of(draft=None, target=None, rollback=None, tokenizer=None):
    pipe = chain(Prefill(), draft or Lookup(), Verify(), Greedy(), rollback or RollbackAuto())
    return bind(pipe, target or HashTarget(), tokenizer)


def made(name: str) -> Target:
    return Target(build(name), {}, name)


class Blocks(Dummy):
    """A drafter with a block, which runs no network here."""

    longest = 5

    @property
    def sources(self) -> tuple[str, ...]:
        return ("blocks",)


# ---- timing ---------------------------------------------------------------------------------------------------------


class Script:
    """Cases whose times are a script, and the clock that they move."""

    def __init__(self, **times):
        self.now, self.ran = 0.0, dict.fromkeys(times, 0)
        self.cases = [Case(name, lambda n=name, f=f: self._run(n, f)) for name, f in times.items()]

    def _run(self, name, time_of) -> float:
        ms = time_of(self.ran[name])
        self.ran[name] += 1
        self.now += ms / 1000
        return ms

    def clock(self) -> float:
        return self.now


def test_medians_of_interleaved_passes():
    order = []
    script = Script(a=lambda n: order.append("a") or 10.0 + n % 2 / 10, b=lambda n: order.append("b") or 20.0)
    times = time_cases(script.cases, 0.16, clock=script.clock)
    assert order == ["a", "b"] * 5
    assert times.timed["a"].ms == 10.0
    assert times.timed["b"] == (20.0, 0.0, 0.0)
    assert times.notes == ()
    assert times.quiet


def test_a_long_pass_is_still_repeated_and_a_short_one_not_for_ever():
    slow, quick = Script(a=lambda n: 10_000.0), Script(a=lambda n: 0.01)
    time_cases(slow.cases, 1.0, clock=slow.clock)
    time_cases(quick.cases, 1.0, clock=quick.clock)
    assert slow.ran["a"] == LEAST
    assert quick.ran["a"] <= 2 * MOST  # short ones run twice a pass


def test_one_disturbed_repeat_moves_nothing():
    script = Script(a=lambda n: 500.0 if n == 2 else 10.0, b=lambda n: 20.0, c=lambda n: 20.0)
    times = time_cases(script.cases, 0.5, clock=script.clock)
    assert times.timed["a"].ms == 10.0
    assert times.quiet


def test_noise_is_repeated_and_then_said():
    noisy = Script(a=lambda n: 10.0 * (1 + n % 3), b=lambda n: 20.0, c=lambda n: 20.0)
    times = time_cases(noisy.cases, 0.4, clock=noisy.clock)
    assert noisy.ran["a"] == noisy.ran["b"] + AGAIN
    assert times.timed["a"].spread > NOISY
    (note,) = times.notes
    assert "not quiet" in note
    assert "the a by" in note
    assert not times.quiet


def test_noise_that_passes_is_not_held_against_the_figures():
    passing = Script(a=lambda n: 30.0 if n < 1 else 10.0, b=lambda n: 20.0, c=lambda n: 20.0)
    times = time_cases(passing.cases, 0.1, clock=passing.clock)
    assert times.timed["a"].ms == 10.0
    assert times.notes == ()


def test_a_machine_that_gets_hot_is_noticed():
    hot = Script(a=lambda n: 10.0 * 1.05**n, b=lambda n: 30.0 * 1.05**n)
    times = time_cases(hot.cases, 0.4, clock=hot.clock)
    assert any("slower while it was measured" in note for note in times.notes)
    assert not times.quiet


def test_a_pace_that_settles_is_what_counts():
    """Clocks fall once, in the middle, and stay: the figures are the later ones. The control above goes on getting slower."""
    settles = Script(a=lambda n: 10.0 if n < 3 else 14.0, b=lambda n: 20.0 if n < 3 else 28.0)
    times = time_cases(settles.cases, 0.2, clock=settles.clock)
    assert (times.timed["a"].ms, times.timed["b"].ms) == (14.0, 28.0)
    assert times.notes == ()
    assert times.quiet


@pytest.mark.parametrize(("step", "luck"), [(1.07, True), (1.2, False)])
def test_of_three_passes_the_last_may_be_slower_by_luck(step, luck):
    script = Script(a=lambda n: 100.0 * step**n, b=lambda n: 200.0 * step**n)
    times = time_cases(script.cases, 0.1, clock=script.clock)
    assert (script.ran["a"] == LEAST) == luck
    assert times.quiet == luck


def test_a_noisy_figure_of_many_repeats_is_as_good_as_a_steady_one_of_few():
    """Repeats spread by 15 % to either side: of 15 the median is within 10 %, of 3 it need not be."""
    few, many = _timed([8.5, 11.5, 10.0]), _timed([8.5, 11.5, 10.0] * 5)
    assert few.error > NOISY > many.error
    assert few.spread == pytest.approx(many.spread)


def test_progress_names_every_case():
    script, told = Script(a=lambda n: 10.0, b=lambda n: 20.0), []
    time_cases(script.cases, 0.1, lambda done, total, what: told.append((done, total, what)), script.clock)
    assert [what for _, _, what in told] == ["a", "b"] * LEAST
    assert [done for done, _, _ in told] == list(range(2 * LEAST))
    assert told[-1][1] == 2 * LEAST


# ---- contexts that nobody prefilled ---------------------------------------------------------------------------------


def shapes(engine, prompt, by_fill: bool) -> list[tuple[int, ...]]:
    """Shapes of all cache arrays two plain steps behind a prompt."""
    buffers = engine.buffers()
    if by_fill:
        fill(buffers, engine.target, prompt, ())
    else:
        for _ in Prefill()(engine.target, buffers, prompt):
            pass
    for token in (5, 6):
        buffers.forward(engine.target, mx.array([[token]]))
        buffers.settle((1,), ((token,),))
    mx.eval(buffers.state)
    assert buffers.held == (len(prompt) + 1,)
    return [a.shape for a in buffers.state]


FILLED = ("llama", "gemma3_text", "qwen3_next", "lfm2", "falcon_h1", "gpt_oss")


@pytest.mark.parametrize("name", FILLED)
@pytest.mark.parametrize("depth", [5, 300])
def test_a_filled_context_is_as_large_as_a_prefilled_one(name, depth):
    engine, prompt = engine_of(target=made(name)), made_up(depth + 1)
    prompt = tuple(t % 50 for t in prompt)
    assert shapes(engine, prompt, by_fill=True) == shapes(engine, prompt, by_fill=False)


def test_a_context_that_is_not_filled_is_caught(monkeypatch):
    engine, prompt = engine_of(target=made("llama")), tuple(t % 50 for t in made_up(301))
    monkeypatch.setattr("dspark.calibrate.fill._stretch", lambda cache, seed, depth: None)
    assert shapes(engine, prompt, by_fill=True) != shapes(engine, prompt, by_fill=False)


def test_a_cache_that_cannot_be_filled_is_named():
    class Strange:
        pass

    with pytest.raises(Unfillable, match="Strange"):
        fill_module._stretch(Strange(), 4, 9)


def test_a_drafter_is_told_the_context_chunk_by_chunk():
    prompt = made_up(1201)
    taps = mx.ones((1, 8, 6))
    told = list(chunks(prompt, taps))
    assert [s.start[0] for s in told] == [512, 1024, 1200]
    assert [s.taps.shape for s in told] == [(1, 512, 6), (1, 512, 6), (1, 176, 6)]
    assert sum((s.tokens[0] for s in told), ()) == prompt


# ---- rounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text"])
def test_a_verify_is_undone(name):
    engine = engine_of(target=made(name))
    bench = Bench(engine, attrs.evolve(engine.pipeline, draft=Dummy()), 40)
    fresh = Bench(engine, bench.pipeline, 40)
    for width in (1, 3, 6):
        assert bench.verify(width) > 0
    assert bench.buffers.held == (40,)
    said = [b.buffers.forward(engine.target, mx.array([[7]]))[0] for b in (bench, fresh)]
    assert mx.array_equal(*said)


def test_a_verify_that_is_not_undone_is_caught(monkeypatch):
    engine = engine_of(target=made("llama"))
    bench, fresh = (Bench(engine, attrs.evolve(engine.pipeline, draft=Dummy()), 40) for _ in range(2))
    monkeypatch.setattr(bench.buffers, "restore", lambda: bench.buffers.settle((4,), ((1,) * 4,)))
    bench.verify(4)
    said = [b.buffers.forward(engine.target, mx.array([[7]]))[0] for b in (bench, fresh)]
    assert not mx.array_equal(*said)


def test_plain_steps_are_sent_ahead():
    """Four steps: while one is read, the next has been sent, so that two are under way."""
    engine = engine_of()
    bench, armed = Bench(engine, attrs.evolve(engine.pipeline, draft=Dummy()), 20), []
    real = bench.buffers.settle

    def settle(keep, fed):
        armed.append(bench.buffers.armed)
        real(keep, fed)

    bench.buffers.settle = settle
    assert bench.plain(3) > 0
    assert armed == [2, 2, 2, 1]


def test_a_round_of_the_own_drafter_goes_on():
    truth = made_up(21)
    target = HashTarget()
    draft = ScriptedDraft((truth + (0,) * 200,), 0.5, taps=(0, 1))
    engine = engine_of(draft, target)
    bench = Bench(engine, engine.pipeline, 20)
    for cap in (1, 3, 3):
        ms, rows = bench.drafted(cap)
        assert ms > 0
        assert rows == cap + 1
    assert bench.state.settled.start[0] == bench.buffers.held[0] > 20


def test_of_rounds_in_a_row_the_first_does_not_count(monkeypatch):
    truth = made_up(21)
    engine = engine_of(ScriptedDraft((truth + (0,) * 200,), 0.5, taps=(0, 1)), HashTarget())
    for rounds, expected in ((4, 2.0), (1, 9.0)):
        ticks = iter([0.0, 9.0, 10.0, 11.0, 20.0, 22.0, 30.0, 33.0])
        monkeypatch.setattr("dspark.calibrate.bench.perf_counter", lambda ticks=ticks: next(ticks) / 1000)
        bench = Bench(engine, engine.pipeline, 20)
        assert bench.drafted(3, rounds) == (pytest.approx(expected), 4)
        assert bench.buffers.held[0] >= 20 + rounds


# ---- the whole measurement ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_measuring_gives_a_usable_curve(name):
    engine, told = engine_of(Lookup(longest=12), made(name)), []
    found = measure(engine, budget_s=0.01, progress=lambda done, total, what: told.append(what))
    grid = found.costs.grids[0]
    assert grid.widths == widths_for(engine.pipeline.draft, kind="cpu")
    assert grid.depths == (256,) or len(grid.depths) == 2
    assert found.costs.sources == ("lookup",)
    assert found.costs.prefill_tokens_s > 0
    assert (found.costs.floor_ms is None) == (name == "qwen3_next"), "experts are not all read"
    assert (found.costs.replay_ms > 0) == (name == "qwen3_next")
    assert CostCurve.from_dict(found.costs.to_dict()).widest == 13
    assert any(what.startswith("warming up, ") for what in told)
    assert found.seconds > 0


def test_two_depths_where_the_target_has_room():
    target = HashTarget()
    found = measure(engine_of(target=target), budget_s=0.01)
    assert found.costs.grids[0].depths == (256, 4096)
    target.context_length = 1000
    assert len(measure(engine_of(target=target), budget_s=0.01).costs.grids[0].depths) == 1


def test_a_quick_measurement_is_smaller():
    quick = measure(engine_of(), quick=True, budget_s=0.01).costs.grids[0]
    assert quick.depths == (256,)
    assert quick.widths == (1, 2, 4, 8, 16, 33)


def test_a_drafter_is_timed_beyond_its_forward():
    found = measure(engine_of(first_of(Lookup(longest=12), Blocks())), budget_s=0.01)
    assert found.costs.sources == ("lookup", "blocks")
    assert found.costs.draft("blocks").caps == (1, 3, 5)
    assert found.costs.grids[0].widths == (1, 2, 3, 4, 5, 6, 8, 12, 13)


@pytest.mark.parametrize(("round_ms", "verify_ms", "draft_ms"), [(9.0, 9.0, 0.0), (13.0, 10.0, 3.0)])
def test_no_verify_takes_longer_than_a_whole_round(monkeypatch, round_ms, verify_ms, draft_ms):
    """Six rows take 10 ms with made-up drafts, and a round of the drafter's own so much."""

    def times(cases, *args, **how):
        of = lambda name: round_ms if name == "blocks round of 5" else 10.0 if name.startswith("verify of 6") else 8.0
        return Times({case.name: Timed(of(case.name), 0.0) for case in cases}, ())

    monkeypatch.setattr(measure_module, "time_cases", times)
    costs = measure(engine_of(Blocks())).costs
    assert costs.verify_at(6, 256) == verify_ms
    assert costs.draft("blocks").at(5) == draft_ms
    assert costs.verify_at(5, 256) == 8.0, "no round has as many rows"


def test_rounds_sent_before_the_one_in_front_is_read_are_timed_whole(monkeypatch):
    """In sessions, the host's part included, and a drafter's price is what makes the curve say so, below zero if need be."""
    to = launched.target()
    engine = launched.engine(first_of(Lookup(longest=12), launched.dspark(to)), to)
    asked, session = [], Bench.session
    monkeypatch.setattr(Bench, "session", lambda bench, *how: (asked.append(how), session(bench, *how))[1])

    def times(cases, *args, **how):
        took = {"dspark round of 7": 0.7, "session": 1.3}
        of = lambda name: took.get(name, 0.8 if "round" in name else 1.2 if name.startswith("verify") else 0.5)
        return Times({case.name: Timed(of(case.name), 0.0) for case in cases}, ())

    monkeypatch.setattr(measure_module, "time_cases", times)
    costs = measure(engine).costs
    assert {how[0] for how in asked if len(how) > 1} == set(costs.draft("dspark").caps)
    assert costs.host_ms == pytest.approx(0.1)
    assert costs.verify_at(8, 256) == 1.2, "lookup's are not sent ahead"
    assert costs.draft("dspark").at(7) < 0
    prices = price_list(costs, 256, "dspark")
    assert prices.draft[7] + prices.host + prices.verify[7] == pytest.approx(0.7)
    assert CostCurve.from_dict(costs.to_dict()).draft("dspark").ms == pytest.approx(costs.draft("dspark").ms)


def test_a_session_of_the_bench_sends_rounds_ahead(monkeypatch):
    to = launched.target()
    engine = launched.engine(launched.dspark(to), to)
    sent, follow = [], type(to.launch).follow
    monkeypatch.setattr(type(to.launch), "follow", lambda *how: (sent.append(how), follow(*how))[1])
    Bench(engine, engine.pipeline, 1).session(5, 4, 10)
    assert len(sent) >= 4
    assert all(ids.shape == (1, 6) for _, ids, *_ in sent)


def test_what_is_compiled_at_first_is_not_counted(monkeypatch):
    """Whatever width runs while times are taken has been run before."""

    class Compiles(HashTarget):
        seen: set

        def __call__(self, ids, caches, target_layer_ids=()):
            self.seen.add(ids.shape[1])
            return super().__call__(ids, caches, target_layer_ids)

    target, real = Compiles(), measure_module.time_cases
    target.seen, before = set(), []

    def timing(*args, **how):
        before.append(set(target.seen))
        return real(*args, **how)

    monkeypatch.setattr(measure_module, "time_cases", timing)
    measure(engine_of(first_of(Lookup(longest=12), Blocks()), target), budget_s=0.01)
    assert before == [target.seen]
    assert len(target.seen) > 8


def test_batches_are_measured_where_asked():
    costs = measure(engine_of(first_of(Lookup(longest=12), Blocks())), batches=(3, 1), budget_s=0.01).costs
    one, three = costs.grids
    assert (one.batch, three.batch) == (1, 3)
    assert three.widths == (1, 2, 3, 4, 5, 6)
    assert three.depths == one.depths
    assert costs.verify_at(2, 256, batch=3) == three.verify_at(2, 256)


def test_a_bench_of_several_rows_verifies_all_of_them():
    engine = engine_of()
    bench = Bench(engine, attrs.evolve(engine.pipeline, draft=Dummy()), 20, rows=3)
    assert bench.buffers.held == (20, 20, 20)
    assert bench.verify(4) > 0
    assert bench.plain(3) > 0
    assert bench.buffers.held == (24, 24, 24)


@pytest.mark.parametrize(("row_ms", "widest"), [(0.0, 33), (20.0, 33), (200.0, 8)])
def test_wide_verifies_are_left_out_where_they_take_too_long(monkeypatch, row_ms, widest):
    """200 ms for a row, and as much, a tenth, or nothing for each further one."""
    monkeypatch.setattr(Bench, "verify", lambda self, width: 200.0 + row_ms * (width - 1))
    found = measure(engine_of(), budget_s=0.01)
    assert found.costs.widest == widest
    assert any("are left out" in note for note in found.notes) == (widest < 33)


def test_widths_are_tried_in_order_of_worth():
    widths = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 33)
    order = by_worth(widths, {1, 2, 6})
    assert order[:3] == [1, 2, 6]
    assert order.index(4) < order.index(33) < order.index(16) < order.index(24)
    assert sorted(order) == list(widths)


def test_caches_that_cannot_be_filled_give_one_depth_and_a_note(monkeypatch):
    def refuse(cache, seed, depth):
        raise Unfillable("a Strange cannot be filled without a prefill")

    monkeypatch.setattr("dspark.calibrate.fill._stretch", refuse)
    found = measure(engine_of(), budget_s=0.01)
    assert len(found.costs.grids[0].depths) == 1
    assert sum("Strange" in note for note in found.notes) == 1


def test_a_recipe_that_never_drafts_is_refused():
    with pytest.raises(InputError, match="never drafts"):
        measure(engine_of(NoDraft()))


def test_widths_that_are_measured():
    assert widths_for(Lookup()) == (1, 2, 3, 4, 8, 9, 12, 16, 24, 33)
    assert widths_for(Blocks()) == (1, 2, 3, 4, 5, 6, 8)
    assert widths_for(Blocks(), quick=True) == (1, 2, 4, 6, 8)
    assert widths_for(Lookup(), kind="cpu") == (1, 2, 3, 4, 8, 12, 16, 33)
    assert widths_for(first_of(Lookup(), Blocks())) == (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 33)


def test_the_floor_counts_what_a_step_reads():
    tied, experts = made("llama"), made("mixtral")
    untied = Target(build("llama", tie_word_embeddings=False), {}, "untied")
    assert read_nbytes(experts) is None
    assert read_nbytes(HashTarget()) is None
    model = untied.core
    table = model.model.embed_tokens.weight.nbytes
    whole = sum(a.nbytes for _, a in tree_flatten(model.parameters()))
    assert read_nbytes(untied) == whole - table
    assert read_nbytes(tied) == sum(a.nbytes for _, a in tree_flatten(tied.core.parameters()))
    assert 0 < floor_ms(tied, "cpu") < 1000


# ---- from an engine to a calibration --------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path, monkeypatch) -> Store:
    """An empty store, and measurements that take no time and find a quiet machine, whatever runs beside."""
    monkeypatch.setitem(measure_module.BUDGET_S, "cpu", 0.01)
    for bound in ("NOISY", "THROTTLED"):
        monkeypatch.setattr(f"dspark.calibrate.timing.{bound}", 1e9)
    return Store(tmp_path)


def test_the_second_time_nothing_is_measured(store, monkeypatch):
    engine = engine_of()
    first = calibrate(engine, "chat", store=store)
    assert first.fresh
    monkeypatch.setattr("dspark.calibrate.calibrator.measure", lambda *a, **k: pytest.fail("measured again"))
    second = calibrate(engine_of(), "renamed", store=store)
    assert not second.fresh
    assert second.calibration.costs.grids[0].widths == first.calibration.costs.grids[0].widths
    assert stored(engine, store).calibration == second.calibration
    with pytest.raises(pytest.fail.Exception):
        calibrate(engine, "chat", store=store, again=True)


def disturbed_times(monkeypatch, spreads: list[tuple[bool, float]]) -> list[bool]:
    """Let measurements say so, in order; returns a list that notes whether each was quick."""
    ran, found = [], measure(engine_of(), budget_s=0.01)

    def fake(engine, quick=False, **how):
        disturbed, spread = spreads[len(ran)]
        ran.append(quick)
        return found._replace(
            costs=attrs.evolve(found.costs, disturbed=disturbed, spread=spread), quiet=not disturbed, notes=()
        )

    monkeypatch.setattr("dspark.calibrate.calibrator.measure", fake)
    return ran


def test_a_disturbed_machine_is_measured_again_until_it_is_quiet(store, monkeypatch):
    ran = disturbed_times(monkeypatch, [(True, 0.5), (True, 0.9), (False, 0.6)])
    spreads = []
    for _ in range(5):
        outcome = calibrate(engine_of(), "chat", store=store)
        spreads.append(outcome.calibration.costs.spread)
    assert ran == [False, True, True], "quickly, and no more once it was quiet"
    assert spreads == [0.5, 0.5, 0.6, 0.6, 0.6], "the better one stays, a quiet one is better than any disturbed one"


def test_a_machine_that_is_always_disturbed_is_left_alone_after_a_few_runs(store, monkeypatch):
    ran = disturbed_times(monkeypatch, [(True, 0.5 - n / 10) for n in range(RETRIES + 1)] + [(False, 0.0)])
    outcomes = [calibrate(engine_of(), "chat", store=store) for _ in range(RETRIES + 3)]
    assert len(ran) == RETRIES + 1
    assert [o.fresh for o in outcomes] == [True] * (RETRIES + 1) + [False] * 2
    assert outcomes[-1].calibration.costs.spread == pytest.approx(0.5 - RETRIES / 10)


def test_a_quiet_machine_is_not_measured_again(store, monkeypatch):
    """The control."""
    ran = disturbed_times(monkeypatch, [(False, 0.5), (False, 0.1)])
    for _ in range(3):
        calibrate(engine_of(), "chat", store=store)
    assert ran == [False]


def test_a_store_that_cannot_be_written_is_a_note(tmp_path, monkeypatch):
    monkeypatch.setitem(measure_module.BUDGET_S, "cpu", 0.01)
    (tmp_path / "file").write_text("")
    outcome = calibrate(engine_of(), "chat", store=Store(tmp_path / "file"))
    assert outcome.fresh
    assert any("DSPARK_CALIBRATION_CACHE" in note for note in outcome.notes)


def test_a_cap_follows_for_a_network_and_from_quiet_figures_only(store, monkeypatch):
    networks = first_of(Lookup(longest=12), Blocks())
    for quiet, follows in ((True, True), (False, False)):
        found = measure(engine_of(networks), budget_s=0.01)
        monkeypatch.setattr(
            "dspark.calibrate.calibrator.measure", lambda *a, f=found, q=quiet, **k: f._replace(quiet=q)
        )
        outcome = calibrate(engine_of(networks), "chat", store=store, again=True)
        assert ("cap" in outcome.calibration.changes) == follows
    assert derived_cap(engine_of(), found.costs) is None, "lookup drafts as long as a match deserves"


def test_identity_is_shapes_and_formats():
    llama = identity_of(engine_of(target=made("llama")))
    again = identity_of(engine_of(target=Target(build("llama", seed=3), {}, "another name")))
    assert llama == again, "weights' values and names do not matter"
    others = [
        identity_of(engine_of(target=Target(build("llama", num_hidden_layers=2), {}, "llama"))),
        identity_of(engine_of(target=Target(build("llama", dtype=mx.bfloat16), {}, "llama"))),
        identity_of(engine_of(first_of(Lookup(), Blocks()), made("llama"))),
        identity_of(engine_of(target=made("mixtral"))),
    ]
    assert len({llama, *others}) == 5
    assert llama.dtype == "float32"
    assert others[1].dtype == "bfloat16"


def test_identity_knows_packed_weights():
    packed = identity_of(engine_of(target=Target(quantized(build("llama")), {}, "llama")))
    assert packed.quantisation.startswith("4-bit/32 x ")
    assert make_plan(HashTarget().make_caches()).summary() in identity_of(engine_of()).kernels
