"""The text of our attention kernel computes causal attention, run on the CPU through stand-ins (tests/shim), whatever lies behind
the keys in use, and it is used where a call brings what it reads."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache
from mlx_vlm.models.cache import KVCache as OtherKVCache

from dspark.buffers.ragged_cache import RaggedKVCache
from dspark.kernels import attention, enable, own_attention, store, ways
from dspark.kernels.attention import Attention
from dspark.kernels.attentions import Attentions
from dspark.kernels.measure import Finding
from tests.precompiled_kernel import stand_in
from tests.test_attention import off, tiny

F16, BF16 = mx.float16, mx.bfloat16
# Half a unit in the last place of the output.
ROUNDING = {F16: 2.0**-11, BF16: 2.0**-8}
# A weight is handed on as two 16-bit numbers: at worst 2^-17 off, on values of up to 5.
CLOSE = 4e-5
# Batch rows, heads, heads of keys, rows, keys in use, capacity, columns, number format.
CASES = [
    (1, 2, 2, 4, 4, 16, 64, F16),
    (1, 3, 1, 1, 1, 256, 32, BF16),
    (2, 6, 2, 5, 37, 64, 96, BF16),
    (1, 4, 1, 16, 300, 512, 128, BF16),
    (1, 2, 2, 8, 131, 131, 64, F16),
    (2, 2, 1, 13, 272, 512, 32, F16),
]
SEVERAL = (2, 6, 2, 5, 300, 512, 64, BF16)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Ways are tried as on a GPU."""
    monkeypatch.setattr(attention, "on_cpu", lambda: False)


def drawn(case, times=1.0):
    """Queries and buffers in which what lies behind the keys in use is no number."""
    batch, heads, kv_heads, rows, seen, room, dim, dtype = case
    queries = (times * mx.random.normal((batch, heads, rows, dim), key=mx.random.key(0))).astype(dtype)
    whole = [mx.random.normal((batch, kv_heads, room, dim), key=mx.random.key(i)) for i in (1, 2)]
    return queries, *(mx.where(mx.arange(room)[:, None] < seen, a, mx.nan).astype(dtype) for a in whole)


def exact(queries, keys, values, seen, scale):
    """The same in float64, and the largest score."""
    q, k, v = (np.array(a.astype(mx.float32), np.float64) for a in (queries, keys[:, :, :seen], values[:, :, :seen]))
    shared = q.shape[1] // k.shape[1]
    scores = q @ np.repeat(k, shared, 1).swapaxes(-1, -2) * scale
    largest = np.abs(scores).max()
    rows = q.shape[2]
    scores[..., np.arange(seen) > seen - rows + np.arange(rows)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ np.repeat(v, shared, 1), largest


def kernel(case, scale=None, change=lambda text: text):
    dim, dtype = case[-2:]
    return stand_in(own_attention.program(own_attention.Variant(dim, dtype == F16, scale or dim**-0.5)), change)


def wrong(case, times=1.0, scale=None, change=lambda text: text):
    """The largest difference, in tolerances; infinite where something is no number."""
    given, seen = drawn(case, times), case[4]
    made = own_attention.attend(kernel(case, scale, change), *given, seen)
    want, largest = exact(*given, seen, scale or case[-2] ** -0.5)
    # Scores are float32 sums: a few units in the last place of the largest one, and as much of a weight.
    room = ROUNDING[case[-1]] * np.abs(want) + CLOSE + 5 * 2.0**-21 * largest
    far = np.abs(np.array(made.astype(mx.float32)) - want) / room
    return np.inf if np.isnan(far).any() else far.max()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_float64s(case):
    assert wrong(case) <= 1


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_large_scores_neither_overflow_nor_vanish(dtype):
    case = (*SEVERAL[:-1], dtype)
    assert wrong(case, times=100.0) <= 1
    assert exact(*drawn(case, 100.0), case[4], 0.125)[1] > 200


def test_another_scale_is_kept():
    assert wrong(SEVERAL, scale=0.31) <= 1


def test_a_row_has_the_same_bits_whatever_came_with_it():
    case = (1, 2, 1, 16, 150, 256, 64, BF16)
    queries, keys, values = drawn(case)
    run = kernel(case)
    whole = own_attention.attend(run, queries, keys, values, 150)
    for rows in range(1, 16):
        part = own_attention.attend(run, queries[:, :, :rows], keys, values, 150 - 16 + rows)
        assert mx.array_equal(part, whole[:, :, :rows]).item()


def test_without_heads_nothing_is_done():
    run = kernel(SEVERAL)
    zero = mx.zeros((1,), mx.int32)
    call = {"output_shapes": [(1,)], "output_dtypes": [BF16], "grid": (32, 1, 1), "threadgroup": (32, 1, 1)}
    (left,) = run(inputs=[zero] * 3, scalars=[0] * 5, **call)
    assert mx.isnan(left).all().item()


BROKEN = {
    "a key too many": ("key <= last", "key <= last + 1"),
    "a key too few": ("key <= last", "key < last"),
    "no scale": ("scores[n][c] * SCALE", "scores[n][c]"),
    "values that do not shrink": ("sums.values[t][2 * half] *= shrink;", ""),
    "weights that do not shrink": ("sums.total[half] *= shrink;", ""),
    "warps with maxima of their own": ("power2(sums.most[half] - best) / all", "1.0f / all"),
    "another head's keys": ("head / (job.heads / job.kv_heads)", "head % job.kv_heads"),
    "keys behind those in use": ("if (key < seen) {", "if (true) {"),
    "weights rounded to 16 bits": ("mma(even, fine, low_halves(a, b), low_halves(c, d));", ""),
    "no wait for the others' maxima": ("sync_block();\nfloat part[2];", "float part[2];"),
    "no wait for the others' sums": ("sync_block();\nfor (int i = warp", "for (int i = warp"),
    "sums overwritten too early": ("high);\n}\nsync_block();", "high);\n}"),
    "rows in the place of heads": ("row) * job.heads + head", "0) * job.heads + head * job.length + row"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_caught(name):
    right, other = BROKEN[name]

    def broken(text):
        assert right in text, "the text changed; break it in another way"
        return text.replace(right, other)

    assert wrong(SEVERAL, change=broken) > 1


# ---- which calls it is for ------------------------------------------------------------------------------------------------

# MLX's own on a CPU rounds weights to 16 bits: of bfloat16 too few for the probe.
PLAIN = Attention(8, 4, 2, 64, True, F16)


def test_shapes_that_are_not_written_say_why():
    assert own_attention.why_not(PLAIN) is None
    for kind, word in (
        (PLAIN._replace(causal=False), "see all keys"),
        (PLAIN._replace(rows=17), "17 rows"),
        (PLAIN._replace(dim=48), "48 columns"),
        (PLAIN._replace(dim=256), "256 columns"),
        (PLAIN._replace(kv_heads=3), "multiple of 3"),
        (PLAIN._replace(dtype=mx.float32), "float32 input"),
    ):
        assert word in own_attention.why_not(kind)


def test_a_cache_must_be_plain_and_hold_what_the_layer_hands_on():
    _, cache = attention.filled(PLAIN, 20)
    k, v = cache.keys_and_values()
    other = OtherKVCache()
    other.keys, other.values, other.offset = cache.keys, cache.values, cache.offset
    assert own_attention.fits(PLAIN, k, v, cache)
    assert own_attention.fits(PLAIN, k, v, other)
    for unfit in (None, KVCache(), RotatingKVCache(64), RaggedKVCache(1), QuantizedKVCache()):
        assert not own_attention.fits(PLAIN, k, v, unfit)
    assert not own_attention.fits(PLAIN, k[:, :, :-1], v[:, :, :-1], cache)
    assert not own_attention.fits(PLAIN._replace(dtype=BF16), k, v, cache)
    assert not own_attention.fits(PLAIN._replace(kv_heads=4), k, v, cache)
    for name, less in (("values", cache.values[:, :, :-1]), ("keys", cache.keys[..., :32]), ("offset", 27)):
        whole = getattr(cache, name)
        setattr(cache, name, less)
        assert not own_attention.fits(PLAIN, k, v, cache)
        setattr(cache, name, whole)
    assert own_attention.fits(PLAIN, k, v, cache)


@pytest.fixture
def launched(monkeypatch):
    """The kernel through its stand-in; a list of the keys in use at each launch."""
    seen = []

    def compiled(kind):
        run = stand_in(own_attention.program(kind))

        def counted(**call):
            seen.append(call["scalars"][3])
            return run(**call)

        return counted

    monkeypatch.setattr(own_attention, "compiled", compiled)
    return seen


def small():
    model = tiny()
    model.set_dtype(F16)
    return model


def forward(model, caches, rows):
    model(mx.array([[5, 7, 9]]), cache=caches)
    return model(mx.array([list(range(10, 10 + rows))]), cache=caches)


def test_a_model_says_the_same_by_the_kernel(launched):
    model = small()
    plain = forward(model, make_prompt_cache(model), 6)
    # The same numbers in another order: some units of a 16-bit float, on logits of up to 1.
    near, modules = 2.0**-8, [m for _, m in model.named_modules()]
    find = lambda kind: attention.way_of(kind, Finding("cuda", 3))
    with Attentions(modules, find):
        assert off(forward(model, make_prompt_cache(model), 6), plain) < near
        assert launched == [9, 9]
        # Three rows are one launch of MLX's own, and a ring is no plain cache.
        launched.clear()
        forward(model, make_prompt_cache(model), 3)
        assert off(forward(model, [RotatingKVCache(64) for _ in model.layers], 6), plain) < near
        assert launched == []
    wrong = lambda kind: lambda *call: -attention.way_of(kind, Finding("cuda"))(*call)
    with Attentions(modules, lambda kind: wrong(kind) if kind.rows > 3 else None):
        assert off(forward(model, make_prompt_cache(model), 6), plain) > 2 * near


@pytest.mark.parametrize("width", [0, 3])
def test_what_the_kernel_is_not_for_goes_another_way(monkeypatch, launched, width):
    queries, cache = attention.filled(PLAIN, 20)
    given = queries, *cache.keys_and_values(), 0.125
    way = attention.way_of(PLAIN, Finding("cuda", width))
    monkeypatch.setattr(attention, "split", lambda q, k, v, scale, sinks, width: ("pieces of", width))
    otherwise = ("pieces of", 3) if width else None
    assert way(*given, None, None) == otherwise
    assert way(*given, mx.zeros((4,)), cache) == otherwise
    assert launched == []
    assert way(*given, None, cache).shape == queries.shape
    monkeypatch.setattr(own_attention, "MOST_KEYS", 27)
    assert way(*given, None, cache) == otherwise
    monkeypatch.setattr(own_attention, "MOST_KEYS", 28)
    monkeypatch.setattr(own_attention, "compiled", lambda kind: None)
    assert way(*given, None, cache) == otherwise
    assert launched == [28]


# ---- the probe ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "pieces", "found"),
    [
        ((5, 5), (8, 8), ("cuda", 3)),
        ((5, 5), (8, 12), ("cuda", 0)),
        ((9, 9), (8, 8), ("split", 3)),
        ((5, 12), (8, 8), ("split", 3)),
        ((5, 12), (8, 12), ("stock", 0)),
    ],
)
def test_the_fastest_right_way_is_taken(monkeypatch, launched, ours, pieces, found):
    def timed(kind, depth, way):
        took = ours if "owned" in way.__qualname__ else pieces
        return took[attention.DEPTHS.index(depth)], 10

    monkeypatch.setattr(attention, "timed", timed)
    monkeypatch.setattr(attention, "WIDTHS", (3,))
    best = attention.measure(PLAIN)
    assert (best.way, best.width) == found
    # Three calls of the kernel, for its error.
    assert launched == [8, 13, 308]


def test_a_wrong_kernel_is_refused(monkeypatch, launched):
    monkeypatch.setattr(attention, "timed", lambda kind, depth, way: (1, 10))
    monkeypatch.setattr(own_attention, "attend", lambda kernel, q, *rest: q)
    assert attention.measure(PLAIN).way == "split"
    monkeypatch.setattr(own_attention, "compiled", lambda kind: None)
    assert [found.way for found in attention.candidates(PLAIN)] == ["split"]


def test_times_are_taken_of_the_same_calls(monkeypatch, launched):
    monkeypatch.setattr(attention, "CALLS", 1)
    monkeypatch.setattr(attention, "REPEATS", 1)
    ours, stock = attention.timed(PLAIN, 40, attention.way_of(PLAIN, Finding("cuda")))
    assert ours > 0
    assert stock > 0
    assert launched == [48, 48]


def test_one_program_serves_all_rows_of_a_shape(monkeypatch):
    asked = []
    monkeypatch.setattr(ways, "compile_all", lambda programs: asked.extend(programs))
    ways.compile_own([PLAIN, PLAIN._replace(rows=16), PLAIN._replace(causal=False), PLAIN._replace(dtype=mx.float32)])
    assert len(dict.fromkeys(asked)) == 1
    assert "#define D 64" in asked[0].header


def test_findings_hold_for_one_text(monkeypatch):
    before, shortened = store.here(), store.shortened
    assert store.here() == before
    monkeypatch.setattr(store, "shortened", lambda name: shortened(name) + "x" * (name == "attention.cu"))
    assert store.here() != before


def test_enable_finds_and_uses_it(tmp_path, monkeypatch, launched):
    times = {4: {"split": 5.0, "owned": 1.0}, 8: {"split": 3.0, "owned": 4.0}}
    timed = lambda kind, depth, way: (times[kind.rows]["owned" if "owned" in way.__qualname__ else "split"], 10.0)
    monkeypatch.setattr(attention, "timed", timed)
    model = small()
    plain = forward(model, make_prompt_cache(model), 6)
    kernels = enable.enable(model, 6, kind="cuda", file=tmp_path / "kernels.json")
    assert {shape.rows: (found.way, found.width) for shape, found in kernels.attention.items()} == {
        4: ("cuda", 3),
        8: ("split", 3),
    }
    assert any("rows 4 cuda, in other caches split by 3 (1 us for 10)" in line for line in kernels.lines())
    launched.clear()
    forward(model, make_prompt_cache(model), 4)
    assert launched == [7, 7]
    assert off(forward(model, make_prompt_cache(model), 6), plain) < 2.0**-8
    kernels.close()
    forward(model, make_prompt_cache(model), 4)
    assert mx.array_equal(forward(model, make_prompt_cache(model), 6), plain)
    assert launched == [7, 7]
