"""A whole forward of a small target in one launch says what float32 arithmetic says, as nearly as 16-bit numbers let it, whatever
rows come together; it writes into caches behind what they hold and nowhere else; what it is not written for is told in words."""

import copy
import ctypes
import gc
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models import gemma3_text, llama, qwen2, qwen3
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear

from dspark.kernels import in_place, stack, tiles
from dspark.kernels.text import shortened
from dspark.models.hooks import Hooks
from tests import stack_trials as trials
from tests.gpu_kernels import build
from tests.precompiled_kernel import aligned
from tests.stack_faults import FAULTS, ONLY_BITS, TOLD, broken
from tests.stack_trials import TAPPED, Case, bits, buffers, forward, numbers, trial, worst

F16, BF16 = mx.float16, mx.bfloat16
# A block takes several of a step's tiles with 3, 5 and 7 blocks, and with 37 there are more blocks than tiles.
CASES = {
    "llama": Case(llama, F16, tied=True, warps=4, splits=2, blocks=3),
    "llama, quantised": Case(llama, BF16, tied=False, quantised=True, mlp=416, warps=2, splits=5, blocks=37),
    "llama 3": Case(llama, F16, tied=False, scaled=True, hidden=128, vocab=160, warps=2, splits=1, blocks=7),
    "qwen3": Case(qwen3, BF16, tied=True, warps=4, splits=2, blocks=3),
    "qwen3, quantised": Case(qwen3, F16, tied=False, quantised=True, heads=2, warps=8, splits=4, blocks=5),
    # A warp has more pieces of `mlp` than it asks for at once.
    "llama, 8 bits": Case(llama, F16, tied=True, bits=8, mlp=608, warps=2, splits=2, blocks=3),
    "llama, 4 bits": Case(llama, BF16, tied=False, bits=4, warps=4, splits=5, blocks=37),
    "qwen3, 8 bits": Case(qwen3, BF16, tied=True, bits=8, group=64, mlp=192, warps=4, splits=2, blocks=5),
    # The columns of `mlp` come in two parts for up to 8 rows, and in three for more.
    "qwen3, in parts": Case(
        qwen3, F16, tied=False, bits=8, heads=2, mlp=1088, warps=2, splits=2, blocks=3, memory=17000
    ),
    # Those of the hidden states come in two parts, for more than 8 rows.
    "llama, in parts": Case(
        llama, BF16, tied=False, bits=8, hidden=576, heads=2, warps=2, splits=2, blocks=3, memory=15000
    ),
    "llama, loud": Case(llama, F16, tied=False, bits=8, warps=2, splits=2, blocks=3, loud=True),
}
# Tokens held and the rows of the forwards behind them: within one tile of 16 keys, and over several of each warp.
RUNS = [(5, (1, 16, 4)), (200, (8, 9))]
# The kernel rounds what enters a product to 16 bits, and MLX's own forward rounds after every operation. A row's error in root
# mean squares over those of MLX's is 0.3 to 1.3 here, and up to 1.9 for MLX's own worst row.
ROOM = 2.0


@pytest.fixture
def t():
    return trial(CASES["llama"], *RUNS[0])


@pytest.fixture
def way(t):
    return forward(t.case, t.model)


@pytest.mark.parametrize(("depth", "widths"), RUNS, ids=["shallow", "deep"])
@pytest.mark.parametrize("name", CASES)
def test_a_forward_is_float32s(name, depth, widths):
    t = trial(CASES[name], depth, widths)
    assert worst(t, forward(t.case, t.model)) <= ROOM


def test_nothing_needs_to_be_held():
    t = trial(CASES["llama"], 5, (6,))
    caches = make_prompt_cache(t.model)
    want = numbers(*trials.plain(trials.exactly(t.model), t.tokens[:, :6], caches), caches)
    own = make_prompt_cache(t.model)
    near = numbers(*trials.plain(t.model, t.tokens[:, :6], own), own)
    emptied = t.caches()
    for cache in emptied:
        cache.trim(5)
    for caches in (emptied, make_prompt_cache(t.model)):
        made = numbers(*forward(t.case, t.model)(t.tokens[:, :6], caches, TAPPED), caches)
        assert max(trials.errors(made, want, near)) <= ROOM


def test_more_rows_than_a_launch_has_are_several_launches():
    t = trial(CASES["llama"], 5, (40,))
    at_once, parts = (said(t, forward(t.case, t.model), widths) for widths in ((40,), (16, 16, 8)))
    assert all(map(np.array_equal, at_once, parts))
    way, caches = forward(t.case, t.model), t.caches()
    logits, taps = way(t.tokens[:, 5:], caches, TAPPED)
    assert (logits.shape, taps.shape) == ((1, 40, 150), (1, 40, 128))
    assert way.said(logits) is None, "nobody looked at all of them together"


# ---- a row's bits ---------------------------------------------------------------------------------------------------------


def said(t, way, widths):
    """What rows get and what they write, as bits, when they come as many at once as `widths` says."""
    caches, outs = t.caches(), []
    for ids in trials.parts(t._replace(widths=widths)):
        logits, taps = way(ids, caches, TAPPED)
        outs.append(np.concatenate([bits(logits[0]), bits(taps[0])], axis=-1))
    written = [bits(a[:, :, : cache.offset]) for cache in caches for a in (cache.keys, cache.values)]
    return [np.concatenate(outs), *written]


def differing(t, way, *widths):
    first, *others = (said(t, way, each) for each in widths)
    return [w for w, other in zip(widths[1:], others, strict=True) if not all(map(np.array_equal, first, other))]


@pytest.mark.parametrize("name", ["llama, quantised", "qwen3", "llama, 4 bits", "qwen3, 8 bits", "qwen3, in parts"])
def test_a_row_has_the_same_bits_whatever_came_with_it(name):
    t = trial(CASES[name], 40, (16,))
    assert differing(t, forward(t.case, t.model), (16,), (1,) * 16, (3, 5, 8), (9, 7), (2, 14)) == []


@pytest.mark.parametrize(("name", "memories"), [("qwen3, in parts", (17000, 8900)), ("llama, in parts", (9000, 7008))])
def test_a_row_has_the_same_bits_however_little_memory_a_block_has(name, memories):
    """With the least of these a block keeps sums of one tile at a time."""
    case = CASES[name]
    t = trial(case, 40, (16,))
    whole = said(t, forward(case._replace(memory=stack.MEMORY), t.model), (5, 3, 8))
    for memory in memories:
        way = forward(case._replace(memory=memory), t.model)
        assert way.stack.shared_bytes <= memory
        assert all(map(np.array_equal, said(t, way, (8, 8)), whole))


# ---- greedy decoding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "wrong"), [(1, 0), (8, 0), (8, 3), (8, 7), (13, 5), (13, 12)])
def test_it_says_which_drafts_stand(t, way, rows, wrong):
    ids = trials.drafted(t, rows, wrong)
    logits, _ = way(ids, t.caches(), TAPPED)
    assert way.said(logits).accepted.item() == wrong
    assert trials.greedy(ids, logits, way.said(logits))
    assert way.said(logits + 0) is None
    way(ids, t.caches(), TAPPED)
    assert way.said(logits) is None


# ---- what a broken text does ----------------------------------------------------------------------------------------------

SMALL = {
    "llama": (
        Case(llama, F16, tied=True, warps=2, splits=5, blocks=3, hidden=48, vocab=90, twins=True),
        170,
        (16, 9, 12),
    ),
    "qwen3": (Case(qwen3, F16, tied=True, warps=2, splits=2, blocks=3, hidden=48, vocab=90), 20, (5, 8)),
    "packed": (Case(llama, F16, tied=True, bits=8, warps=2, splits=3, blocks=3, vocab=90), 60, (5, 9)),
    "normed": (Case(qwen3, F16, tied=True, bits=8, warps=2, splits=2, blocks=3, heads=4, vocab=90), 20, (5, 9)),
    "parts": (
        Case(llama, F16, tied=True, bits=8, mlp=352, warps=2, splits=2, blocks=3, vocab=90, memory=8200),
        20,
        (5, 9),
    ),
    "bfloat": (
        Case(llama, BF16, tied=True, bits=8, hidden=256, warps=2, splits=2, blocks=3, vocab=90, memory=7500),
        20,
        (5, 9),
    ),
    "loud": (
        Case(llama, F16, tied=False, bits=8, hidden=256, warps=2, splits=2, blocks=3, vocab=90, loud=True),
        20,
        (5, 9),
    ),
}


def told(t, way):
    """What is wrong with forwards, if anything."""
    try:
        if worst(t, way, ROOM) > ROOM:
            return "wrong numbers"
        ids = trials.drafted(t, t.widths[0], 2)
        logits, _ = way(ids, t.caches(), TAPPED)
        return "nothing" if trials.greedy(ids, logits, way.said(logits)) else "wrong words"
    except RuntimeError as stopped:
        return str(stopped)


@pytest.mark.parametrize("name", SMALL)
def test_a_text_with_all_faults_off_is_right(name):
    t = trial(*SMALL[name])
    assert told(t, broken(t)) == "nothing"


@pytest.mark.parametrize("name", [name for name in FAULTS if name != ONLY_BITS])
def test_a_broken_text_is_caught(name):
    t = trial(*SMALL[FAULTS[name][0]])
    assert TOLD.get(name, "wrong") in told(t, broken(t, name))


def test_sums_that_depend_on_how_many_rows_are_caught():
    t = trial(*SMALL["llama"])
    orders = (16, 9, 12), (12, 16, 9)
    assert differing(t, broken(t), *orders) == []
    way = broken(t, ONLY_BITS)
    assert worst(t, way) <= ROOM
    assert differing(t, way, *orders) == [orders[1]]


UNSCALED = lambda rope: 10000.0 ** (-mx.arange(0, 64, 2) / 64)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("in_pairs", lambda matrix, dim: matrix), ("tiled", lambda matrix: matrix), ("frequencies", UNSCALED)],
)
def test_weights_in_other_places_are_caught(monkeypatch, name, wrong):
    t = trial(CASES["llama 3"], *RUNS[1])
    monkeypatch.setattr(tiles, name, wrong)
    assert worst(t, forward(t.case, t.model), ROOM) > ROOM


# ---- caches ---------------------------------------------------------------------------------------------------------------


def test_caches_move_on_by_the_rows(t, way):
    caches = t.caches()
    logits, taps = way(t.tokens[:, 5:9], caches, TAPPED)
    assert (logits.shape, taps.shape) == ((1, 4, 150), (1, 4, 128))
    assert (logits.dtype, taps.dtype) == (F16, F16)
    assert [cache.offset for cache in caches] == [9, 9]
    without, none = way(t.tokens[:, 5:9], t.caches(), ())
    assert none is None
    assert np.array_equal(bits(without), bits(logits))


def test_buffers_grow_and_keep_what_they_hold(monkeypatch, t, way):
    widths = (4, 4, 4, 9)
    roomy = said(t, way, widths)
    monkeypatch.setattr(in_place, "GROWTH", 8)
    caches, rooms = t.caches(), []
    for ids in trials.parts(t._replace(widths=widths)):
        way(ids, caches, TAPPED)
        rooms.append({a.shape[2] for a in buffers(caches)})
    assert rooms == [{16}, {16}, {24}, {32}]
    assert all(map(np.array_equal, said(t, way, widths), roomy))
    together = in_place.together
    monkeypatch.setattr(in_place, "together", lambda arrays, held, needed: together(arrays, held - 1, needed))
    assert not all(map(np.array_equal, said(t, way, widths), roomy))


def test_nobody_who_held_the_buffers_sees_a_change(t, way):
    caches = t.caches()
    kept, twins = buffers(caches), copy.deepcopy(caches)
    before = [bits(a) for a in kept]
    for cut in (0, 3, 3):
        for cache in caches:
            cache.trim(cut)
        way(t.tokens[:, 5:11], caches, TAPPED)
    assert all(map(np.array_equal, before * 2, map(bits, [*kept, *buffers(twins)])))


@pytest.mark.parametrize("left", [True, False])
def test_what_was_left_is_copied_before_it_is_written_again(t, way, left):
    caches = t.caches()
    way(t.tokens[:, 5:11], caches, TAPPED)
    kept = buffers(copy.deepcopy(caches))
    before = [bits(a) for a in kept]
    if left:
        way.leave(caches)
    for cache in caches:
        cache.trim(3)
    way(t.tokens[:, 11:14], caches, TAPPED)
    assert all(map(np.array_equal, before, map(bits, kept))) == left


def test_mlx_writes_where_the_kernel_left(t, way):
    caches, far = t.caches(), []
    for i, (ids, exact, own) in enumerate(zip(trials.parts(t), t.exact, t.own, strict=True)):
        if i == 1:
            way.leave(caches)
        out = trials.plain(t.model, ids, caches) if i == 1 else way(ids, caches, TAPPED)
        far += trials.errors(numbers(*out, caches), exact, own)
    assert max(far) <= ROOM


@pytest.mark.parametrize("told", [True, False])
def test_what_somebody_else_wrote_unasked_is_seen(t, way, told):
    """Caches that hold more than the last forward left are copied anew."""
    caches = t.caches()
    for i, (ids, exact, own) in enumerate(zip(trials.parts(t), t.exact, t.own, strict=True)):
        out = trials.plain(t.model, ids, caches) if i == 1 else way(ids, caches, TAPPED)
        if i == 1 and not told:
            known = way._buffers._known
            known[caches[0]] = known[caches[0]]._replace(end=caches[0].offset)
        far = max(trials.errors(numbers(*out, caches), exact, own))
    assert (far <= ROOM) == told


@pytest.fixture
def copies(monkeypatch):
    """Tokens held by the buffers that were copied."""
    seen, together = [], in_place.together
    monkeypatch.setattr(
        in_place, "together", lambda arrays, held, needed: seen.append(held) or together(arrays, held, needed)
    )
    return seen


def test_caches_are_copied_once_whoever_comes_between(t, way, copies):
    both, ids = (t.caches(), t.caches()), t.tokens[:, 5:7]
    for _ in range(3):
        for caches in both:
            way(ids, caches, TAPPED)
    assert copies == [5, 5]
    way.leave(both[1])
    for caches in both:
        way(ids, caches, TAPPED)
    assert copies == [5, 5, 11]


def test_buffers_go_with_their_caches(t, way):
    caches = t.caches()
    way(t.tokens[:, 5:7], caches, TAPPED)
    other = t.caches()
    way(t.tokens[:, 5:7], other, TAPPED)
    assert len(way._buffers._known) == 2
    del caches
    gc.collect()
    assert len(way._buffers._known) == 1


def test_a_launch_takes_what_the_one_before_gave(t):
    ends = []

    def noted(kind):
        run = trials.compiled(kind)

        def kernel(**call):
            out = run(**call)
            ends.append((call["inputs"][4], out))
            return out

        return kernel

    ways = [forward(t.case, t.model, noted) for _ in range(2)]
    for way in (*ways, *ways):
        way(t.tokens[:, 5:7], t.caches(), TAPPED)
    assert all(any(taken is end for end in given) for (_, given), (taken, _) in pairwise(ends))
    assert len(ends) == 4


def test_copies_go_ways_of_their_own(t, way):
    ways = [t.tokens[:, 5:11], t.tokens[:, 11:17]]

    def alone(ids):
        caches = t.caches()
        outs = [bits(way(part, caches, TAPPED)[0]) for part in (t.tokens[:, 5:8], ids, ids)]
        return outs[1:]

    wanted = list(map(alone, ways))
    caches = t.caches()
    way(t.tokens[:, 5:8], caches, TAPPED)
    both = caches, copy.deepcopy(caches)
    for step in range(2):
        for own, ids, want in zip(both, ways, wanted, strict=True):
            assert np.array_equal(bits(way(ids, own, TAPPED)[0]), want[step])
    assert not np.array_equal(wanted[0][1], wanted[1][1])


def test_what_is_trimmed_is_overwritten(t, way):
    others = t.tokens[:, 10:15]

    def after(first, cut):
        caches = t.caches()
        way(first, caches, TAPPED)
        for cache in caches:
            cache.trim(cut)
        out = way(others, caches, TAPPED)
        return [bits(a) for a in (*out, *(a[:, :, : caches[0].offset] for a in buffers(caches)))]

    want = after(t.tokens[:, 5:8], 0)
    assert all(map(np.array_equal, after(t.tokens[:, 5:13], 5), want))
    assert not any(map(np.array_equal, after(t.tokens[:, 5:13], 4), want))


def test_with_no_rows_nothing_is_done(t):
    kernel = trials.compiled(stack.study(t.model)._replace(tapped=TAPPED, blocks=3, warps=4, splits=2))
    given, outputs = [mx.zeros((1,), mx.int32) for _ in range(7)], 6 + 5
    made = kernel(
        inputs=given,
        output_shapes=[(1,)] * outputs,
        output_dtypes=[mx.int32] * outputs,
        scalars=[0] * 4,
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
    )
    assert not any(a.item() for a in given)
    assert [a.item() for a in made] == [-1] * outputs


def test_which_forwards_it_takes(t, way):
    ids = lambda *shape: mx.zeros(shape, mx.int32)
    takes = lambda caches, rows=3: way.takes(ids(1, rows), caches, TAPPED)
    caches = t.caches()
    most = stack.MOST_LAUNCHED
    assert [takes(caches, rows) for rows in (1, 8, 9, 16, 17, most, most + 1)] == [True] * 6 + [False]
    assert not way.takes(ids(2, 3), caches, TAPPED)
    assert not takes(None)
    assert not takes([])
    assert not takes(caches[:1])
    assert takes(make_prompt_cache(t.model))
    assert not takes(t.caches(BF16))
    assert not takes([cache.to_quantized() for cache in caches])
    ring, plain = RotatingKVCache(64), caches[1]
    ring.update_and_fetch(*plain.keys_and_values())
    assert not takes([ring, ring])
    assert not takes([plain, ring])
    assert not takes([QuantizedKVCache(), plain])
    assert takes(caches)
    way.kernel = lambda rows, tapped: (way.stack, None)
    assert not takes(caches)


# ---- which targets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_what_it_is_written_for(name):
    case = CASES[name]
    model = trials.target(case)
    found = stack.study(model)
    norms = case.module is qwen3
    dim = 128 if norms else 64
    assert found == stack.Stack(
        case.hidden,
        case.heads,
        case.heads // 2,
        dim,
        case.mlp,
        2,
        case.vocab,
        case.tied,
        norms,
        case.dtype == F16,
        0.05,
        dim**-0.5,
    )
    for kept in (found, found._replace(bits=8))[: 1 + bool(case.bits)]:
        assert kept.nbytes == tiles.packed(model, kept).nbytes
    hooks = Hooks()
    hooks.add([model, model.model.layers[0].self_attn.rope])
    assert stack.study(model) == found
    hooks.close()


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("words", "module", "other"),
    [
        ("class mlx_lm.models.qwen2.Model", qwen2, {}),
        ("class mlx_lm.models.gemma3_text.Model", gemma3_text, {}),
        ("biases", llama, {"attention_bias": True}),
        ("biases", llama, {"mlp_bias": True}),
        ("window", llama, {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 32}),
        ("heads of 80", llama, {"head_dim": 80}),
        ("72", llama, {"hidden_size": 72}),
        ("100", llama, {"intermediate_size": 100}),
        ("positions", llama, {"rope_traditional": True}),
        ("positions", llama, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("positions", llama, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        ("positions", qwen3, {"rope_scaling": YARN}),
    ],
)
def test_what_it_is_not_written_for_is_told(words, module, other):
    assert words in stack.study(trials.target(CASES["llama"]._replace(module=module), **other))


def test_float32_and_size_are_told(monkeypatch):
    model = trials.target(CASES["llama"])
    assert "float32 numbers" in stack.study(trials.exactly(model))
    found = stack.study(model)
    monkeypatch.setattr(stack, "MOST_BYTES", found.nbytes)
    assert stack.study(model) == found
    monkeypatch.setattr(stack, "MOST_BYTES", found.nbytes - 1)
    assert "of weights" in stack.study(model)


# ---- places and sizes -----------------------------------------------------------------------------------------------------

QWEN = stack.Stack(1024, 16, 8, 128, 3072, 28, 151936, True, True, False, 1e-6, 0.1, (1, 9), 16, 2, 132)
LLAMA = stack.Stack(2048, 32, 8, 64, 8192, 16, 128256, True, False, False, 1e-5, 0.1, (1, 9), 16, 1, 132)
SMALLEST = stack.Stack(16, 2, 1, 64, 16, 1, 40, True, True, True, 1e-5, 0.1, (0,), 16, 1, 1, 2, 1)
KINDS = (QWEN, LLAMA, SMALLEST, QWEN._replace(bits=8), LLAMA._replace(bits=8))


SHIM = '#define SHARED_BYTES 16\n#include "stack.hpp"\n'


def cut(body, name, behind):
    """What a text says from a name on, up to what is behind it."""
    return body[body.index(name) : body.index(behind, body.index(name))]


@pytest.fixture(scope="module")
def text():
    """What the text says of sizes: `size0`, `size1`, ... of what blocks share."""
    parts = [f"#define HALF 1\n{SHIM}using namespace dspark_stack;\n"]
    for i, kind in enumerate(KINDS):
        front = stack.program(kind).text.split("struct Job")[0].replace("dspark_stack", f"kind{i}")
        parts.append(f"{front}}}\n")
        parts.append(f'extern "C" long size{i}() {{ return sizeof(kind{i}::Scratch); }}\n')
        parts += [f"#undef {line.split()[1]}\n" for line in front.splitlines() if line.startswith("#define")]
    return build("".join(parts))


def test_scratch_has_room_for_what_blocks_share(text):
    for i, kind in enumerate(KINDS):
        size = getattr(text, f"size{i}")()
        # No more is left over than parts are aligned by.
        assert 0 <= kind.scratch_bytes - size <= 256


VALUES = [0.0, -np.inf, -2.5, -1e-30, -0.0, 0.0, 1e-30, 2.5, 65504.0, np.inf]


def misplaced(right="", wrong=""):
    """Pairs of values of which the later one's key does not say whether it is larger."""
    body = shortened("stack.cu")
    body = cut(body, "__device__ __forceinline__ u64 key_of(", "__device__ __forceinline__ u64 better(")
    assert right in body
    front = '#define HALF 1\n#define SHARED_BYTES 16\n#include "stack.hpp"\nnamespace dspark_stack {\n'
    own = 'extern "C" u64 key(float value, int place) { return key_of(value, place); }\n'
    key = build(f"{front}{body.replace(right, wrong) if right else body}{own}}}").key
    key.restype, key.argtypes = ctypes.c_ulonglong, [ctypes.c_float, ctypes.c_int]
    assert all(key(value, 1 << 20) for value in VALUES), "anything is better than nothing"
    return [(a, b) for a in VALUES for b in VALUES if (key(b, 8) > key(a, 7)) != (b > a)]


def test_keys_are_in_the_order_of_an_argmax():
    assert misplaced() == []


@pytest.mark.parametrize(
    ("right", "wrong"), [(" + 0.0f", ""), ("0xffffffffu - (u32)place", "(u32)place"), ("bits | 0x80000000u", "bits")]
)
def test_keys_in_another_order_are_caught(right, wrong):
    assert misplaced(right, wrong)


def looked_for(width, dtype, packed, rows, columns):
    """All numbers [rows, columns] of a matrix in pieces, as the text looks for them: uint32, the bits of float32."""
    body = shortened("stack.cu")
    own = (
        'extern "C" void all(const uint4* matrix, int rows, int columns, float* out) {\n'
        "for (int i = 0; i < rows * columns; ++i) out[i] = number(matrix, i / columns, i % columns, columns / COLUMNS);\n}\n"
    )
    places = cut(body, "constexpr int COLUMNS", "constexpr int HIDDEN_TILES")
    places += cut(body, "__device__ __forceinline__ float number(", "__device__ __forceinline__ void put_tap(")
    front = f"#define HALF {int(dtype == F16)}\n#define BITS {width}\n{SHIM}namespace dspark_stack {{\n"
    lib = build(f"{front}{places}{own}}}")
    held, out = aligned(np.array(packed.reshape(-1).view(mx.uint8))), np.zeros((rows, columns), np.float32)
    lib.all(ctypes.c_void_p(held.ctypes.data), rows, columns, ctypes.c_void_p(out.ctypes.data))
    return out.view(np.uint32)


def test_tiles_are_where_the_text_looks_for_them():
    rows, columns = 48, 80
    matrix = np.arange(rows * columns, dtype=np.uint16).reshape(rows, columns)
    made = lambda matrix: looked_for(16, BF16, tiles.tiled(mx.array(matrix)), rows, columns) >> 16
    assert np.array_equal(made(matrix), matrix)
    swapped = matrix.reshape(3, 2, 8, columns).swapaxes(1, 2).reshape(rows, columns)
    assert not np.array_equal(made(swapped), matrix)


# ---- weights of 8 bits ----------------------------------------------------------------------------------------------------


def matrix_of(rows, columns, dtype):
    mx.random.seed(5)
    numbers = mx.random.randint(0, 256, (rows, columns)).astype(mx.uint8)
    return tiles.Bytes(numbers, *(mx.random.normal((rows, columns // 32)).astype(dtype) for _ in range(2)))


def whole(matrix):
    """The numbers that a packed matrix stands for, float32."""
    scales, biases = (mx.repeat(a.astype(mx.float32), 32, axis=1) for a in matrix[1:])
    return scales * matrix.numbers.astype(mx.float32) + biases


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_bytes_are_where_the_text_looks_for_them(dtype):
    rows, columns = 48, 96
    matrix = matrix_of(rows, columns, dtype)
    want = np.array(whole(matrix).astype(dtype).astype(mx.float32)).view(np.uint32)
    made = lambda matrix: looked_for(8, dtype, tiles.tiled_bytes(matrix), rows, columns)
    assert np.array_equal(made(matrix), want)
    moved = lambda a: a.reshape(3, 2, 8, -1).swapaxes(1, 2).reshape(a.shape)
    neighbours = matrix.numbers.reshape(-1, 4)[:, mx.array([0, 2, 1, 3])].reshape(rows, columns)
    for wrong in (
        matrix.each(moved),
        matrix._replace(scales=moved(matrix.scales)),
        matrix._replace(scales=matrix.biases, biases=matrix.scales),
        matrix._replace(numbers=neighbours),
    ):
        assert not np.array_equal(made(wrong), want)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_bytes_are_what_was_packed(width, group):
    """Scales of 16 bits times a byte are float32 numbers, so that no order of operations rounds."""
    mx.random.seed(5)
    module = nn.QuantizedLinear.from_linear(nn.Linear(256, 48, bias=False), group, width)
    module.set_dtype(BF16)
    made = tiles.Bytes.of(module)
    assert (made.numbers.shape, made.scales.shape, made.biases.shape) == ((48, 256), (48, 8), (48, 8))
    assert (made.numbers.dtype, made.scales.dtype) == (mx.uint8, BF16)
    module.set_dtype(mx.float32)
    want = np.array(tiles.unpacked(module, mx.float32))
    assert np.array_equal(np.array(whole(made)), want)
    assert len(np.unique(np.array(made.numbers))) == 1 << width
    shifted = made._replace(numbers=mx.roll(made.numbers, 1, axis=1))
    assert not np.array_equal(np.array(whole(shifted)), want)


def decoded(half, right="", wrong=""):
    """Of each byte in each place of a word, what the text makes of it: [place, byte]. Other places hold other bytes."""
    body = shortened("stack.cu")
    assert right in body
    own = 'extern "C" u32 two(u32 word, int pair) { return decode(word, pair); }\n'
    own += 'extern "C" float wide(u32 value) { return UNIT * widen((u16)value); }\n'
    cut_out = cut(body, "constexpr float UNIT", "struct Piece")
    own = (cut_out.replace(right, wrong) if right else cut_out) + own
    lib = build(f"#define HALF {half}\n{SHIM}namespace dspark_stack {{\n{own}}}")
    lib.two.restype, lib.two.argtypes = ctypes.c_uint32, [ctypes.c_uint32, ctypes.c_int]
    lib.wide.restype, lib.wide.argtypes = ctypes.c_float, [ctypes.c_uint32]
    found = np.zeros((4, 256))
    for place in range(4):
        for byte in range(256):
            word = sum((byte + 85 * (place - i)) % 256 << 8 * i for i in range(4))
            found[place, byte] = lib.wide(lib.two(word, place & 1) >> 16 * (place >> 1) & 0xFFFF)
    return found


@pytest.mark.parametrize("half", [0, 1])
def test_a_byte_is_a_number_about_zero(half):
    assert np.array_equal(decoded(half), np.tile(np.arange(-128, 128), (4, 1)))


@pytest.mark.parametrize(
    ("half", "right", "wrong"),
    [
        (1, "0xB400B400u", "0xB3F0B400u"),
        (1, "0x78007800u", "0x7C007800u"),
        (1, "0x00FF00FFu", "0x007F00FFu"),
        (0, "0xBF80BF80u", "0xBF80BF00u"),
        (0, "0x7E807E80u", "0x7E807F00u"),
        (0, "0x00FF00FFu", "0x01FF00FFu"),
        (0, "8 * pair", "0"),
    ],
)
def test_bytes_read_otherwise_are_caught(half, right, wrong):
    assert not np.array_equal(decoded(half, right, wrong), np.tile(np.arange(-128, 128), (4, 1)))


def test_a_large_target_keeps_its_weights_packed(monkeypatch):
    model = trials.target(CASES["llama, 4 bits"])
    small = stack.study(model)
    assert small.bits == 16
    monkeypatch.setattr(stack, "MOST_BYTES", small.nbytes)
    assert stack.study(model) == small
    monkeypatch.setattr(stack, "MOST_BYTES", small.nbytes - 1)
    packed = small._replace(bits=8)
    assert stack.study(model) == packed
    assert packed.nbytes * 16 == small.nbytes * 9
    monkeypatch.setattr(stack, "MOST_PACKED_BYTES", packed.nbytes)
    assert stack.study(model) == packed
    monkeypatch.setattr(stack, "MOST_PACKED_BYTES", packed.nbytes - 1)
    assert "of weights, where" in stack.study(model)


def repacked(which, group, width, mode="affine"):
    """The target of 4 bits with some of its weights packed in another way."""
    model = trials.target(CASES["llama, 4 bits"]._replace(bits=0))
    for rest in (False, True):
        chosen = lambda path, module, rest=rest: hasattr(module, "to_quantized") and (which in path) != rest
        if not rest and width:
            nn.quantize(model, group, width, mode=mode, class_predicate=chosen)
        elif rest:
            nn.quantize(model, 32, 4, class_predicate=chosen)
    model.set_dtype(BF16)
    return model


@pytest.mark.parametrize(
    ("words", "which", "group", "width", "mode"),
    [
        ("not all are packed", "", 32, 0, "affine"),
        ("not all are packed", "lm_head", 32, 0, "affine"),
        ("not all are packed", "embed", 32, 0, "affine"),
        ("not all are packed", "layers.1.mlp.down", 32, 0, "affine"),
        ("not all are packed", "o_proj", 32, 4, "mxfp4"),
        ("some are packed in 3 bits in groups of 32", "", 32, 3, "affine"),
        ("some are packed in 6 bits in groups of 64", "lm_head", 64, 6, "affine"),
        ("", "layers.0", 32, 2, "affine"),
        ("", "v_proj", 64, 8, "affine"),
    ],
)
def test_weights_that_cannot_be_held_in_8_bits_are_told(monkeypatch, words, which, group, width, mode):
    model = repacked(which, group, width, mode)
    small = stack.study(model)
    assert small.bits == 16, "a small target's are unpacked"
    monkeypatch.setattr(stack, "MOST_BYTES", small.nbytes - 1)
    found, why = stack.study(model), stack.unfit(model, small)
    if not words:
        assert (found, why) == (small._replace(bits=8), None)
    else:
        assert words in why
        assert f"GB of weights, where {stack.MOST_BYTES / 1e9:.1f} are the most, and {why}" in found


def test_scales_of_another_format_and_odd_columns_are_told():
    model = trials.target(CASES["llama, 4 bits"])
    found = stack.study(model)
    assert stack.unfit(model, found) is None
    assert "some are packed" in stack.unfit(model, found._replace(half=True))
    assert "multiples of 32" in stack.unfit(model, found._replace(mlp=48))


@pytest.mark.parametrize("dim", [64, 128])
def test_a_tile_holds_columns_and_those_that_are_turned_with_them(dim):
    """Rows r and r + 8 of tile t are columns i and i + D / 2 of a head, with i = 8 t + r."""
    heads = 3
    matrix = np.arange(heads * dim * 2).reshape(heads * dim, 2)
    made = np.array(tiles.in_pairs(mx.array(matrix), dim))
    for tile in range(heads * dim // 16):
        head, start = divmod(8 * tile, dim // 2)
        for r in range(8):
            low = head * dim + start + r
            assert made[16 * tile + r].tolist() == matrix[low].tolist()
            assert made[16 * tile + r + 8].tolist() == matrix[low + dim // 2].tolist()


def test_matrices_and_vectors_lie_where_the_text_begins_them(t):
    kind = stack.study(t.model)
    assert tiles.packed(t.model, kind).size == kind.nbytes // 2
    norms = tiles.vectors(t.model, kind)
    assert norms.size == 5 * kind.hidden + kind.dim // 2
    assert np.array_equal(bits(norms[-32 - 64 : -32].astype(F16)), bits(t.model.model.norm.weight))


def at_once(parts, nbytes, dtype):
    """The control: all that a matrix is made of is kept until the last is."""
    return mx.concatenate([part.reshape(-1, tiles.PIECE[dtype.size]) for part in list(parts)])


def test_packing_needs_room_for_one_matrix_more(monkeypatch):
    """In copies: most bytes in use at once besides the model, the copy's own among them."""
    model = trials.target(CASES["llama, 4 bits"]._replace(hidden=512), num_hidden_layers=4)
    kind = stack.study(model)._replace(bits=8)
    mx.eval(model.parameters())

    def needed():
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        whole = tiles.packed(model, kind)
        mx.eval(whole)
        assert whole.nbytes == kind.nbytes
        return (mx.get_peak_memory() - before) / kind.nbytes, np.array(whole)

    (small, packed), (large, want) = needed(), (monkeypatch.setattr(tiles, "joined", at_once), needed())[1]
    assert np.array_equal(packed, want)
    assert small < 1.5 < large


@pytest.mark.parametrize("at", [(0, "q_proj"), (1, "v_proj")])
def test_a_target_with_adapters_goes_its_own_way(at):
    model = trials.target(CASES["llama"])
    number, name = at
    attention = model.layers[number].self_attn
    setattr(attention, name, LoRALinear.from_base(getattr(attention, name)))
    assert "adapters" in stack.study(model)
