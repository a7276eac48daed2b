"""The promise: rows of different lengths in one forward say what each would say alone, whatever each keeps, and whoever joins
or leaves between rounds."""

import random

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from dspark.buffers.batch import batch_of, ragged_fault
from dspark.buffers.quantize import KVBits
from dspark.buffers.ragged import RaggedBuffers
from dspark.buffers.ragged_cache import RaggedKVCache
from dspark.buffers.single import SingleBuffers
from dspark.buffers.stacked import StackedBuffers
from dspark.errors import DsparkError
from dspark.models.target import Target
from dspark.stages.rollback import Checkpoint, RollbackAuto
from tests.families import build

KINDS = ["llama", "gpt_oss", "gemma4_text", "qwen3_5", "nemotron_h", "lfm2", "rwkv7", "mamba", "recurrent_gemma"]
KINDS += [
    "baichuan_m1",
    "falcon_h1",
    "bailing_hybrid",
    "kimi_k3",
    "deepseek_v32",
    "longcat_flash_ngram",
    "vlm/nemotron_h",
]
LENGTHS = (19, 4, 26, 12)
# As in test_rollback: other shapes and masks sum in other orders.
TOLERANCE = 2e-4
_targets: dict[str, Target] = {}


def target_of(name):
    if name not in _targets:
        _targets[name] = Target(build(name))
    return _targets[name]


def filled(target, prompt, plan=None, kv=None):
    buffers = SingleBuffers(target.make_caches(), plan or RollbackAuto().plan(target), kv)
    if len(prompt):
        buffers.forward(target, mx.array([prompt]))
        buffers.settle((len(prompt),), (tuple(prompt),))
        mx.eval(buffers.state)
    return buffers


def after(target, ids, following):
    logits, _ = target(mx.array([[*ids, *following]]), target.make_caches())
    return logits[:, len(ids) :]


def off(a, b):
    return mx.abs(a - b).max().item()


def draw(chance, n):
    return [chance.randrange(256) for _ in range(n)]


class Script:
    """A batch and, beside it, the tokens that each row should hold."""

    def __init__(self, target, layout=RaggedBuffers, lengths=LENGTHS, seed=0, **options):
        self.target, self.chance = target, random.Random(seed)
        self.held = [draw(self.chance, n) for n in lengths]
        rows = [filled(target, held, **options) for held in self.held]
        self.batch = layout(rows[0])
        for row in rows[1:]:
            self.batch.admit(row)

    def round(self, width, keep):
        blocks = [draw(self.chance, width) for _ in self.held]
        logits, _ = self.batch.forward(self.target, mx.array(blocks))
        worst = max(
            off(logits[i : i + 1], after(self.target, held, block))
            for i, (held, block) in enumerate(zip(self.held, blocks, strict=True))
        )
        self.batch.settle(tuple(keep), tuple(tuple(block) for block in blocks))
        mx.eval(self.batch.state)
        self.held = [held + block[:k] for held, block, k in zip(self.held, blocks, keep, strict=True)]
        assert self.batch.held == tuple(map(len, self.held))
        return worst


@pytest.mark.parametrize("name", KINDS)
def test_every_row_keeps_its_own_count(name):
    script = Script(target_of(name))
    for width, keep in ((5, (2, 5, 1, 3)), (1, (1, 1, 1, 1)), (5, (5, 0, 4, 1)), (3, (1, 2, 3, 3)), (1, (1, 1, 1, 1))):
        assert script.round(width, keep) < TOLERANCE


@pytest.mark.parametrize("layout", [RaggedBuffers, StackedBuffers])
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_5", "nemotron_h"])
def test_rows_join_and_leave_between_rounds(name, layout):
    target = target_of(name)
    script = Script(target, layout, lengths=(9, 14))
    assert script.round(4, (1, 3)) < TOLERANCE
    for n in (6, 21):
        script.held.append(draw(script.chance, n))
        script.batch.admit(filled(target, script.held[-1]))
    assert script.round(4, (2, 4, 1, 2)) < TOLERANCE
    script.batch.retire([3, 0])
    script.held = [script.held[3], script.held[0]]
    assert script.round(4, (4, 1)) < TOLERANCE
    script.batch.retire([1])
    script.held = script.held[1:]
    assert script.round(3, (2,)) < TOLERANCE
    script.held.append(draw(script.chance, 5))
    script.batch.admit(filled(target, script.held[-1]))
    assert script.round(2, (2, 1)) < TOLERANCE
    assert script.round(1, (1, 1)) < TOLERANCE


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_5"])
def test_an_undone_round_leaves_nothing(name):
    script = Script(target_of(name))
    script.round(4, (1, 2, 3, 4))
    script.batch.forward(script.target, mx.array([draw(script.chance, 6) for _ in script.held]))
    assert script.batch.armed == 1
    script.batch.restore()
    script.batch.forward(script.target, mx.array([[1], [2], [3], [4]]))
    script.batch.forward(script.target, mx.array([[1], [2], [3], [4]]))
    script.batch.restore(1)
    script.batch.settle((1, 1, 1, 1), ())
    script.held = [[*held, i + 1] for i, held in enumerate(script.held)]
    assert script.round(3, (1, 1, 1, 1)) < TOLERANCE


def test_a_fork_of_a_batch_goes_its_own_way():
    script = Script(target_of("nemotron_h"), lengths=(9, 4))
    twin = script.batch.fork()
    twin.forward(script.target, mx.array([[1, 2], [3, 4]]))
    twin.settle((2, 1), ())
    assert script.round(3, (1, 2)) < TOLERANCE


def test_a_row_with_no_token_yet_joins_where_no_state_means_zeros():
    script = Script(target_of("qwen3_5"), lengths=(7, 0))
    assert script.round(3, (2, 3)) < TOLERANCE
    gemma = target_of("recurrent_gemma")
    batch = RaggedBuffers(filled(gemma, [1, 2, 3]))
    with pytest.raises(DsparkError, match="a prompt of one token cannot join a batch with this model"):
        batch.admit(filled(gemma, []))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_quantised_rows_say_what_they_say_alone(name, bits):
    target = Target(build(name, head_dim=32))
    kv, chance = KVBits(bits=bits, group_size=32), random.Random(1)
    prompts = [draw(chance, n) for n in (9, 4, 14)]
    batch = RaggedBuffers(filled(target, prompts[0], kv=kv))
    alone = [filled(target, prompt, kv=kv) for prompt in prompts]
    for prompt in prompts[1:]:
        batch.admit(filled(target, prompt, kv=kv))
    for width, keep in ((4, (1, 4, 2)), (1, (1, 1, 1)), (4, (3, 1, 4)), (2, (2, 1, 1))):
        blocks = [draw(chance, width) for _ in prompts]
        logits, _ = batch.forward(target, mx.array(blocks))
        for i, row in enumerate(alone):
            said, _ = row.forward(target, mx.array(blocks[i : i + 1]))
            assert off(said, logits[i : i + 1]) < TOLERANCE
            row.settle((keep[i],), ())
        batch.settle(keep, ())
    assert "QuantizedRaggedKVCache" in {type(cache).__name__ for cache in batch.leaves}
    assert isinstance(batch_of(target, filled(target, prompts[0], kv=kv)), RaggedBuffers)
    late = batch_of(target, filled(target, prompts[0], kv=KVBits(bits=bits, group_size=32, start=10)))
    assert late.reason == "rows reach the 10 tokens from which their caches are quantised at different times"


@pytest.mark.parametrize("name", ["deepseek_v41", "gemma2", "vlm/qwen3_5", "llama4"])
def test_rows_that_cannot_share_a_forward_are_right_one_after_another(name):
    script = Script(target_of(name), lambda row: batch_of(target_of(name), row), lengths=(9, 4, 14))
    assert isinstance(script.batch, StackedBuffers)
    for width, keep in ((4, (1, 4, 2)), (1, (1, 1, 1)), (4, (3, 1, 4))):
        assert script.round(width, keep) < TOLERANCE
    if name == "deepseek_v41":
        assert max(script.batch.owed_tokens) > 0
        script.batch.pay(script.target)
        assert script.batch.owed_tokens == (0, 0, 0)


def test_a_plan_that_feeds_again_is_stacked_and_says_why():
    target = target_of("qwen3_5")
    row = filled(target, [1, 2, 3], Checkpoint().plan(target))
    batch = batch_of(target, row)
    assert isinstance(batch, StackedBuffers)
    assert batch.reason == "layer 0 is rolled back by checkpoint, which has no form for several rows"
    with pytest.raises(DsparkError, match="rolled back by checkpoint"):
        RaggedBuffers(filled(target, [1, 2], Checkpoint().plan(target)))


def test_a_batch_that_forgets_to_roll_rows_back_is_caught(monkeypatch):
    target = target_of("llama")
    plan = RollbackAuto().plan(target)
    assert ragged_fault(target, plan) is None
    monkeypatch.setattr(RaggedKVCache, "set_lengths", lambda self, lengths: None)
    assert "come out" in ragged_fault(target, plan)


def test_a_batch_that_replays_a_row_short_is_caught(monkeypatch):
    from dspark.models.recurrence import Tape

    target = target_of("nemotron_h")
    rebuild = Tape.rebuild
    short = lambda self, cache, how, before, keep: rebuild(self, cache, how, before, [max(k - 1, 0) for k in keep])
    monkeypatch.setattr(Tape, "rebuild", short)
    assert "come out" in ragged_fault(target, RollbackAuto().plan(target))


# ---- the cache alone ----------------------------------------------------------------------------------------------------


def visible(cache, width):
    """For each row and query of a block fed now: the positions that it may look at, read off keys that hold them."""
    mask = cache.make_mask(width)
    start = mx.array(cache.lengths)[:, None] + mx.arange(width)[None]
    rows = start.astype(mx.float32)[:, None, :, None]
    keys, values = cache.update_and_fetch(rows, rows)
    assert mx.array_equal(keys, values).item()
    at = keys[:, 0, :, 0].astype(mx.int32)
    batch, columns = at.shape
    if mask is None or isinstance(mask, str):
        query = mx.arange(columns - width, columns)[:, None] if isinstance(mask, str) else mx.array([[columns]])
        mask = mx.broadcast_to(mx.arange(columns)[None] <= query, (batch, 1, width, columns))
    mask = mx.broadcast_to(mask, (batch, 1, width, columns))[:, 0].tolist()
    at = at.tolist()
    return [[sorted(p for p, ok in zip(at[b], row, strict=True) if ok) for row in mask[b]] for b in range(batch)]


def wanted(length, width, window):
    return [list(range(max(0, length + i + 1 - window) if window else 0, length + i + 1)) for i in range(width)]


def single(length, window):
    cache = RotatingKVCache(max_size=window) if window else KVCache()
    for i in range(0, length, 3):
        rows = mx.arange(i, min(i + 3, length)).astype(mx.float32)[None, None, :, None]
        cache.update_and_fetch(rows, rows)
    return cache


@pytest.mark.parametrize("window", [None, 8, 11])
@pytest.mark.parametrize("seed", range(4))
def test_a_row_looks_at_its_own_tokens_and_no_stale_one(window, seed):
    chance = random.Random(seed)
    cache = RaggedKVCache.adopt(single(chance.randrange(1, 30), window), slack=5)
    for _ in range(2):
        cache.extend(RaggedKVCache.adopt(single(chance.randrange(0, 30), window), slack=5))
    for step in range(40):
        width = chance.choice([1, 1, 3, 6])
        before = list(cache.lengths)
        assert visible(cache, width) == [wanted(n, width, window) for n in before]
        cache.set_lengths([n + chance.randint(0, width) for n in before])
        if step == 20:
            cache = cache.take([2, 0])
            cache.extend(RaggedKVCache.adopt(single(17, window), slack=5))
        if step == 30:
            cache.widen(9)
        if window:
            assert cache.columns <= window + cache.slack


def test_a_block_wider_than_the_slack_is_refused():
    cache = RaggedKVCache.adopt(single(20, 8), slack=2)
    with pytest.raises(DsparkError, match="a block of 4 rows needs a slack of 3 behind the window, not 2"):
        visible(cache, 4)


def test_too_little_slack_would_show():
    """The ring's slack is what makes going back free: with none, a rolled back row looks at a stale or missing token."""
    cache = RaggedKVCache.adopt(single(20, 8), slack=0)
    visible(cache, 1)
    cache.slack = 3
    cache.set_lengths([20])
    assert visible(cache, 3) != [wanted(20, 3, 8)]


def test_lengths_move_for_nothing_and_storage_grows_in_steps():
    cache = RaggedKVCache(2)
    rows = mx.zeros((2, 1, 5, 4))
    sizes = set()
    for _ in range(120):
        cache.update_and_fetch(rows, rows)
        sizes.add(cache.columns)
    assert sizes == {256, 512, 768}
    held = cache.keys
    cache.set_lengths([3, 100])
    assert cache.keys is held
    assert cache.offset.tolist() == [3, 100]


@pytest.mark.parametrize("lengths", [(4, 1), (1, 1), (0, 1)])
def test_windows_that_are_not_full_yet_stand_beside_others(lengths):
    script = Script(target_of("longcat_flash_ngram"), lengths=lengths)
    for width, keep in ((3, (1, 3)), (3, (2, 1)), (1, (1, 1))):
        assert script.round(width, keep) < TOLERANCE
