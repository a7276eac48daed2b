"""The promise: after settle(keep) the caches are those of a model that was fed the kept tokens only, for every keep, after any
sequence of blocks and single rows, and a plan that would break it is refused when it is bound."""

import copy
import random

import attrs
import mlx.core as mx
import pytest
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, RotatingKVCache

from dspark.buffers.leaves import all_leaves, is_recurrent
from dspark.buffers.plan import make_plan
from dspark.buffers.probe import prove, window_fault
from dspark.buffers.quantize import KVBits
from dspark.buffers.rollers import CheckpointRoller, ReplayRoller, TrimRoller, WindowRoller
from dspark.buffers.single import MAX_OWED, SingleBuffers
from dspark.errors import BindError, DsparkError, PoisonedBuffers
from dspark.models.recurrence import Tape
from dspark.models.target import Target
from dspark.stages.rollback import Checkpoint, KvTrim, RecurrenceReplay, RollbackAuto
from tests.families import build
from tests.speculation import drafted, plain, prompts

# One family for each kind of cache and recurrence.
KINDS = [
    "llama",
    "gpt_oss",
    "qwen3_5",
    "nemotron_h",
    "lfm2",
    "rwkv7",
    "mamba",
    "jamba",
    "recurrent_gemma",
    "bailing_hybrid",
]
KINDS += ["baichuan_m1", "falcon_h1", "longcat_flash_ngram", "llama4", "deepseek_v41", "vlm/qwen3_5", "kimi_k3"]
PROMPT = [7, 3, 250, 11, 8, 90, 41, 5, 66, 13, 2]
# float32 logits of standard deviation 1.4: other orders of summing move them by up to 5e-5 (Mamba-2, MLA, wrapped windows),
# a missing token by 1 or more.
TOLERANCE = 2e-4
_targets: dict[str, Target] = {}


def target_of(name):
    if name not in _targets:
        _targets[name] = Target(build(name))
    return _targets[name]


def filled(target, plan=None, prompt=PROMPT, kv=None):
    buffers = SingleBuffers(target.make_caches(), plan or RollbackAuto().plan(target), kv)
    feed(target, buffers, prompt)
    return buffers


def feed(target, buffers, ids):
    logits, _ = buffers.forward(target, mx.array([ids]))
    buffers.settle((len(ids),), (tuple(ids),))
    mx.eval(logits, buffers.state)
    return logits


def after(target, ids, following):
    """What a fresh model says to `following` behind `ids`."""
    logits, _ = target(mx.array([[*ids, *following]]), target.make_caches())
    return logits[:, len(ids) :]


def off(a, b):
    return mx.abs(a - b).max().item()


PLANS = {
    "auto": RollbackAuto().plan,
    "checkpoint": Checkpoint().plan,
    "module": lambda t: RollbackAuto().plan(t).demoted([layer.index for layer in RollbackAuto().plan(t).layers]),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", KINDS)
def test_every_keep_leaves_what_a_fresh_forward_leaves(name, plan):
    target, block = target_of(name), [9, 21, 77, 140]
    plan = PLANS[plan](target)
    for keep, following in enumerate(([33], [60, 4, 18], [33], [60, 4, 18], [33])):
        buffers = filled(target, plan)
        buffers.forward(target, mx.array([block]))
        if keep == 0:
            buffers.restore()
        else:
            buffers.settle((keep,), (tuple(block),))
        assert buffers.held == (len(PROMPT) + keep,)
        logits = feed(target, buffers, following)
        assert off(logits, after(target, PROMPT + block[:keep], following)) < TOLERANCE


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "recurrent_gemma", "qwen3_5", "kimi_k3", "deepseek_v41"])
def test_any_sequence_of_blocks_and_single_rows_leaves_the_same(name):
    target, chance = target_of(name), random.Random(4)
    buffers, held = filled(target), list(PROMPT)
    for _ in range(24):
        width = chance.choice([1, 1, 2, 5])
        block = [chance.randrange(256) for _ in range(width)]
        keep = chance.randint(0, width)
        buffers.forward(target, mx.array([block]))
        if keep:
            buffers.settle((keep,), (tuple(block),))
        else:
            buffers.restore()
        held += block[:keep]
        mx.eval(buffers.state)
    assert off(feed(target, buffers, [5]), after(target, held, [5])) < TOLERANCE


def test_the_plan_of_each_kind_is_the_cheapest_that_holds():
    said = {name: {type(layer.roller) for layer in RollbackAuto().plan(target_of(name)).layers} for name in KINDS}
    assert said["llama"] == said["llama4"] == {TrimRoller}
    assert said["gpt_oss"] == {TrimRoller, WindowRoller}
    assert said["deepseek_v41"] == {CheckpointRoller}
    hybrids = set(KINDS) - {"llama", "llama4", "gpt_oss", "deepseek_v41"}
    assert all(ReplayRoller in said[name] and CheckpointRoller not in said[name] for name in hybrids)


def test_recurrences_are_rebuilt_from_their_inputs_and_modules_run_again_only_where_they_resist():
    again = {
        name
        for name in KINDS
        for layer in RollbackAuto().plan(target_of(name)).layers
        if isinstance(layer.roller, ReplayRoller) and layer.roller.how.slots is None
    }
    assert again == {"vlm/qwen3_5", "longcat_flash_ngram"}


@pytest.mark.parametrize(
    "name", ["qwen3_5", "nemotron_h", "lfm2", "rwkv7", "mamba", "jamba", "recurrent_gemma", "kimi_linear"]
)
def test_a_rebuilt_state_is_bit_for_bit_that_of_a_block_of_the_kept_rows(name):
    target, block = target_of(name), [9, 21, 77, 140]
    rolled, fresh = filled(target), filled(target)
    rolled.forward(target, mx.array([block]))
    rolled.settle((3,), (tuple(block),))
    fresh.forward(target, mx.array([block[:3]]))
    for a, b in zip(rolled.leaves, fresh.leaves, strict=True):
        if is_recurrent(a):
            assert all(mx.array_equal(x, y).item() for x, y in zip(a.cache, b.cache, strict=True))


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h", "lfm2"])
def test_a_replay_reads_no_weight(name, monkeypatch):
    """Nothing but primitives and slices runs: no module is called."""
    target = target_of(name)
    buffers, block = filled(target), [9, 21, 77, 140]
    buffers.forward(target, mx.array([block]))
    import mlx.nn as nn

    def called(self, *args, **kwargs):
        raise AssertionError("a linear layer ran in a replay")

    monkeypatch.setattr(nn.Linear, "__call__", called)
    buffers.settle((2,), (tuple(block),))
    mx.eval(buffers.state)


def test_full_acceptance_builds_nothing(monkeypatch):
    target = target_of("qwen3_5")
    buffers = filled(target)
    buffers.forward(target, mx.array([[9, 21, 77]]))
    before = [list(c.cache) for c in buffers.leaves if is_recurrent(c)]
    buffers.settle((3,), ((9, 21, 77),))
    slots = [list(c.cache) for c in buffers.leaves if is_recurrent(c)]
    assert all(x is y for a, b in zip(before, slots, strict=True) for x, y in zip(a, b, strict=True))


# ---- windows ------------------------------------------------------------------------------------------------------------


def test_a_rotating_cache_is_right_past_its_window():
    assert window_fault(RotatingKVCache(max_size=8), WindowRoller()) is None


def test_plain_trim_past_the_window_is_caught_by_the_probe():
    assert "looks at" in window_fault(RotatingKVCache(max_size=8), TrimRoller())
    target = target_of("gemma3_text")
    plan = RollbackAuto().plan(target)
    wrong = [attrs.evolve(x, roller=TrimRoller()) if x.cache == "RotatingKVCache" else x for x in plan.layers]
    with pytest.raises(BindError, match="rolled back wrongly past its window"):
        prove(target, attrs.evolve(plan, layers=tuple(wrong)))


def test_plain_trim_past_the_window_is_caught_by_greedy_text():
    target = target_of("gemma3_text")
    plan = RollbackAuto().plan(target)
    wrong = [attrs.evolve(x, roller=TrimRoller()) if x.cache == "RotatingKVCache" else x for x in plan.layers]
    assert decoded_wrongly(target, attrs.evolve(plan, layers=tuple(wrong)))


def test_a_window_never_grows_beyond_itself_and_a_block():
    cache, roller = RotatingKVCache(max_size=8), WindowRoller()
    for i in range(40):
        width, keep = ((5, 2), (1, 1), (3, 3), (5, 1))[i % 4]
        rows = mx.zeros((1, 1, width, 4))
        ticket = roller.arm(cache, width)
        cache.update_and_fetch(rows, rows)
        assert cache.keys.shape[2] <= 8 + width - 1 or cache.offset <= 8
        if keep < width:
            roller.settle(cache, ticket, width, keep, None)


def test_two_single_rows_past_a_window_cannot_be_undone_and_say_so():
    target = target_of("gpt_oss")
    buffers = filled(target)
    for token in (4, 5):
        buffers.forward(target, mx.array([[token]]))
    assert buffers.armed == 2
    buffers.restore(1)
    assert buffers.armed == 1
    buffers.forward(target, mx.array([[5]]))
    with pytest.raises(DsparkError, match="went 2 single rows past its window"):
        buffers.restore()
    buffers.poison("a round failed")
    with pytest.raises(PoisonedBuffers, match="a round failed; open a new session"):
        buffers.forward(target, mx.array([[5]]))


# ---- debts --------------------------------------------------------------------------------------------------------------


def test_owed_tokens_stay_under_a_bound_and_are_paid():
    target = target_of("qwen3_5")
    buffers = filled(target, Checkpoint().plan(target))
    held = list(PROMPT)
    for i in range(40):
        block = [i, 2 * i, 3 * i, 200 - i]
        buffers.forward(target, mx.array([block]))
        buffers.settle((2,), (tuple(block),))
        held += block[:2]
        assert 0 < buffers.owed_tokens[0] <= MAX_OWED + 4
    buffers.pay(target)
    assert buffers.owed_tokens == (0,)
    assert off(feed(target, buffers, [9]), after(target, held, [9])) < TOLERANCE


def test_taps_of_owed_rows_are_dropped():
    target = target_of("qwen3_5")
    buffers = filled(target, Checkpoint().plan(target))
    buffers.forward(target, mx.array([[9, 21, 77]]), (0, 3))
    buffers.settle((1,), ((9, 21, 77),))
    logits, taps = buffers.forward(target, mx.array([[5, 6]]), (0, 3))
    assert logits.shape[:2] == taps.shape[:2] == (1, 2)
    _, fresh = target(mx.array([[*PROMPT, 9, 5, 6]]), target.make_caches(), (0, 3))
    assert off(taps, fresh[:, -2:]) < TOLERANCE


def test_a_fork_goes_its_own_way():
    target = target_of("nemotron_h")
    buffers = filled(target)
    twin = buffers.fork()
    feed(target, twin, [1, 2, 3])
    assert off(feed(target, buffers, [9]), after(target, PROMPT, [9])) < TOLERANCE
    assert off(feed(target, twin, [9]), after(target, [*PROMPT, 1, 2, 3], [9])) < TOLERANCE


def test_trim_cuts_what_can_be_cut_and_refuses_the_rest():
    llama, hybrid, windowed = target_of("llama"), target_of("qwen3_5"), target_of("gpt_oss")
    buffers = filled(llama)
    assert buffers.trim(4)
    assert off(feed(llama, buffers, [9]), after(llama, PROMPT[:4], [9])) < TOLERANCE
    assert not filled(hybrid).trim(4)
    assert not filled(windowed).trim(4)
    short = filled(windowed, prompt=PROMPT[:6])
    assert short.trim(4)
    assert off(feed(windowed, short, [9]), after(windowed, PROMPT[:4], [9])) < TOLERANCE


def test_a_cache_that_appends_to_its_arrays_is_cut_not_moved():
    plan = make_plan([ConcatenateKVCache()])
    cache, roller = ConcatenateKVCache(), plan.layers[0].roller
    rows = mx.arange(6.0).reshape(1, 1, 6, 1)
    cache.update_and_fetch(rows[..., :3, :], rows[..., :3, :])
    ticket = roller.arm(cache, 3)
    cache.update_and_fetch(rows[..., 3:, :], rows[..., 3:, :])
    roller.settle(cache, ticket, 3, 1, None)
    keys, _ = cache.update_and_fetch(rows[..., :1, :], rows[..., :1, :])
    assert keys.flatten().tolist() == [0, 1, 2, 3, 0]


# ---- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stage", "message"),
    [
        (
            "qwen3_5",
            KvTrim(),
            "layer 0 caches a ArraysCache, which 'kv-trim' cannot roll back; works: auto, recurrence-replay, checkpoint",
        ),
        (
            "deepseek_v41",
            RecurrenceReplay(),
            "layer 0 caches a LayerCache, which 'recurrence-replay' cannot roll back; works: auto, checkpoint",
        ),
    ],
)
def test_a_method_that_cannot_serve_names_layer_class_and_choices(name, stage, message):
    with pytest.raises(BindError) as caught:
        stage.plan(target_of(name))
    assert str(caught.value) == message


def test_a_plan_says_what_it_does():
    plan = RollbackAuto().plan(target_of("falcon_h1"))
    assert plan.summary() == "recurrence-replay (4 of 8), kv-trim (4 of 8)"
    assert plan.lines()[0].startswith("4 x ArraysCache: recurrence-replay (recurrence only); a rejection costs")


# ---- the probe ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Nothing(TrimRoller):
    """Rollback switched off."""

    def settle(self, cache, ticket, width, keep, tape):
        pass


@attrs.frozen
class OneShort(ReplayRoller):
    """Replays one row less than was kept."""

    def settle(self, cache, ticket, width, keep, tape):
        cache.cache = tape.rebuild(cache, self.how, ticket, (keep - 1,))


def spoiled(plan, kind, roller):
    layers = [
        attrs.evolve(layer, roller=roller(layer.roller) if isinstance(layer.roller, kind) else layer.roller)
        for layer in plan.layers
    ]
    return attrs.evolve(plan, layers=tuple(layers))


def decoded_wrongly(target, plan):
    """Whether greedy text over these buffers differs from the target's own."""

    class Fixed:
        def plan(self, target):
            return plan

    asked = prompts(target.vocab_size, (12,))
    said = [plain(target, asked[0], 30)]
    stage = RollbackAuto()
    original = type(stage).plan
    type(stage).plan = lambda self, target: plan
    try:
        return drafted(target, asked, said, 30, 0.5, stage) != said
    finally:
        type(stage).plan = original


WRONG = {
    "rollback off": ("llama", TrimRoller, lambda roller: Nothing()),
    "rollback off for one recurrence": ("qwen3_5", ReplayRoller, lambda roller: Stale(roller.how)),
    "replay one row short": ("nemotron_h", ReplayRoller, lambda roller: OneShort(roller.how)),
    "one short, convolutions only": ("lfm2", ReplayRoller, lambda roller: OneShort(roller.how)),
}


@attrs.frozen
class Stale(ReplayRoller):
    """Leaves a recurrent state as the whole block left it."""

    def settle(self, cache, ticket, width, keep, tape):
        pass


@pytest.mark.parametrize("fault", WRONG)
def test_a_broken_rollback_is_refuted_by_the_probe_and_shows_in_the_text(fault):
    name, kind, roller = WRONG[fault]
    target = target_of(name)
    plan = attrs.evolve(spoiled(RollbackAuto().plan(target), kind, roller), method="recurrence-replay")
    with pytest.raises(BindError, match=r"is refuted on this model: behind a rollback its logits are .* off"):
        prove(target, plan)
    assert decoded_wrongly(target, plan)


def test_under_auto_a_refuted_replay_falls_to_the_next_method_and_says_so():
    target = target_of("qwen3_5")
    plan = spoiled(RollbackAuto().plan(target), ReplayRoller, lambda roller: OneShort(roller.how))
    proof = prove(target, plan)
    assert {layer.roller.detail for layer in proof.plan.layers if layer.roller.records} == {"its module again"}
    assert "layers 0, 1, 2: recurrence-replay (3 of 4), kv-trim (1 of 4) was refuted" in proof.notes[0]
    assert proof.worst <= proof.tolerance


def test_a_proof_states_what_it_measured():
    proof = prove(target_of("gemma3_text"), RollbackAuto().plan(target_of("gemma3_text")))
    assert proof.past_window
    assert 0 < proof.worst <= proof.tolerance == pytest.approx(4 * proof.noise)
    assert proof.signal > 1000 * proof.tolerance
    assert proof.summary().startswith("proved: ")


def test_a_proof_is_remembered_for_this_model_and_these_versions_only(tmp_path):
    path = tmp_path / "cache" / "proofs.json"
    target = target_of("qwen3_5")
    plan = RollbackAuto().plan(target)
    assert not prove(target, plan, remember=path).remembered
    again = prove(target, plan, remember=path)
    assert again.remembered
    assert again.plan == plan
    assert not prove(target, Checkpoint().plan(target), remember=path).remembered
    other = Target(build("qwen3_5", num_hidden_layers=8))
    assert not prove(other, RollbackAuto().plan(other), remember=path).remembered
    path.write_text("not json")
    assert not prove(target, plan, remember=path).remembered


def test_a_model_that_says_nan_is_refused():
    model = build("llama")
    model.model.norm.weight = model.model.norm.weight * float("nan")
    target = Target(model)
    with pytest.raises(BindError, match="own forward gives other logits"):
        prove(target, RollbackAuto().plan(target))


def test_a_forward_that_cannot_be_verified_is_one_sentence():
    target = Target(build("gpt_oss", head_dim=32))
    kv = KVBits(bits=8, group_size=32)

    def build_buffers(plan):
        return SingleBuffers(target.make_caches(), plan, kv)

    with pytest.raises(BindError, match=r"verifying a few tokens fails on this model: ValueError: .*sinks"):
        prove(target, RollbackAuto().plan(target), build_buffers)


# ---- quantised caches ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide():
    return {name: Target(build(name, head_dim=32)) for name in ("qwen3", "qwen3_5", "gemma3_text")}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "gemma3_text"])
@pytest.mark.parametrize("start", [0, 14])
def test_quantised_caches_roll_back_to_the_same(wide, name, bits, start):
    target, block = wide[name], [9, 21, 77, 140]
    kv = KVBits(bits=bits, group_size=32, start=start)
    kv.check(target)
    for plan in (RollbackAuto().plan(target), Checkpoint().plan(target)):
        rolled = filled(target, plan, kv=kv)
        rolled.forward(target, mx.array([block]))
        rolled.settle((2,), (tuple(block),))
        fresh = filled(target, plan, kv=kv)
        feed(target, fresh, block[:2])
        for ids in ([5], [6, 7], [8]):
            assert off(feed(target, rolled, ids), feed(target, fresh, ids)) < TOLERANCE
        assert any(type(c).__name__ == "QuantizedKVCache" for c in rolled.leaves)
    if start == 0:
        proof = prove(target, RollbackAuto().plan(target), lambda p: SingleBuffers(target.make_caches(), p, kv))
        assert proof.worst <= proof.tolerance < proof.signal


def test_what_cannot_be_quantised_is_said():
    with pytest.raises(
        BindError, match=r"kv_group_size 64 does not divide the 16 numbers a head of layer 0; leave kv_bits out"
    ):
        KVBits().check(target_of("llama"))
    with pytest.raises(BindError, match="no layer of this model has a plain KV cache"):
        KVBits().check(target_of("mamba"))
    with pytest.raises(BindError, match="bits is 7; allowed: 2, 3, 4, 5, 6, 8"):
        KVBits(bits=7)
    with pytest.raises(BindError, match="start is -1"):
        KVBits(start=-1)


def test_members_of_cache_lists_are_quantised_too():
    target = Target(build("falcon_h1", head_dim=32))
    caches = target.make_caches()
    KVBits(bits=8, group_size=32).apply(caches)
    assert [type(c).__name__ for c in all_leaves(caches)] == ["ArraysCache", "QuantizedKVCache"] * 4


# ---- tapes --------------------------------------------------------------------------------------------------------------


def test_a_tape_of_one_thread_does_not_hear_another_target():
    target, other = target_of("qwen3_5"), Target(build("qwen3_5", seed=1))
    caches, strange = target.make_caches(), other.make_caches()
    tape = target.record(3)
    assert isinstance(tape, Tape)
    target(mx.array([[1, 2, 3]]), caches, (), tape)
    other(mx.array([[1, 2, 3]]), strange)
    assert all(id(c) not in tape._entries for c in strange)
    assert sum(id(c) in tape._entries for c in caches) == 3


def test_a_closed_target_cannot_roll_recurrences_back_and_says_so():
    target = Target(build("qwen3_5"))
    buffers = filled(target)
    target.close()
    buffers.forward(target, mx.array([[9, 21, 77]]))
    with pytest.raises(DsparkError, match="ran unrecorded, so it cannot be rolled back; was its target closed"):
        buffers.settle((1,), ((9, 21, 77),))


def test_copies_of_a_cache_survive_a_checkpoint_of_in_place_writes():
    cache, roller = RotatingKVCache(max_size=8), CheckpointRoller()
    one = lambda x: mx.full((1, 1, 1, 1), x)
    for i in range(10):
        cache.update_and_fetch(one(float(i)), one(float(i)))
    before = copy.deepcopy(cache.keys)
    ticket = roller.arm(cache, 1)
    cache.update_and_fetch(one(99.0), one(99.0))
    roller.rewind(cache, ticket)
    assert mx.array_equal(cache.keys, before).item()
    assert cache.offset == 10


def test_an_unknown_cache_gets_a_checkpoint():
    class StrangeCache(KVCache):
        pass

    plan = make_plan([StrangeCache(), KVCache()])
    assert [type(layer.roller) for layer in plan.layers] == [CheckpointRoller, TrimRoller]
    assert plan.refeeds
