"""The text of our GPU kernels computes the product that it should, run on the CPU through stand-ins (tests/shim)."""

import mlx.core as mx
import pytest

from tests.gpu_kernels import HOMES, multiply

# Of float32's product. The kernels multiply whole numbers exactly and sum in float32, so all that remains is the last
# rounding, half a unit in the last place (2^-8 of bfloat16, 2^-11 of float16), and the sums' order: 1e-4 of the largest.
ROUNDING = {mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11}
ORDER = 1e-4

CASES = [  # rows, outputs, k, bits, group, number format; each is compiled, so each meets several things at once
    (3, (32,), 576, 4, 32, mx.float16),  # the last stage of K is not full, and scales are copied by 4 bytes
    (8, (64,), 640, 4, 64, mx.bfloat16),
    (5, (32, 16, 16), 320, 8, 32, mx.bfloat16),  # three matrices in a launch
    (1, (32,), 128, 8, 64, mx.float16),  # fewer stages than warps
    (16, (32, 16), 1024, 8, 64, mx.bfloat16),  # two columns of rows
    (13, (32,), 1024, 4, 32, mx.bfloat16),
    (9, (16, 32), 512, 4, 64, mx.float16),
]


def drawn(rows, out, k, bits, group, dtype, seed=0):
    key = mx.random.key(seed)
    weights = []
    for n in out:
        key, one, two = mx.random.split(key, 3)
        packed, scales, biases = mx.quantize(mx.random.normal((n, k), key=one), group_size=group, bits=bits)
        # Scales that differ much from group to group: one taken from the wrong place shows.
        scales = scales * mx.random.uniform(0.25, 4, scales.shape, key=two)
        weights.append((packed, scales.astype(dtype), biases.astype(dtype)))
    return mx.random.normal((rows, k), key=key).astype(dtype), weights


def wrongness(made, x, weights, bits, group):
    """The largest error, in tolerances."""
    worst = 0.0
    for y, parts in zip(made, weights, strict=True):
        wide = (parts[0], *(a.astype(mx.float32) for a in parts[1:]))
        exact = x.astype(mx.float32) @ mx.dequantize(*wide, group_size=group, bits=bits).T
        room = ROUNDING[x.dtype] * mx.abs(exact) + ORDER * mx.abs(exact).max()
        far = mx.abs(y.astype(mx.float32) - exact) / room
        worst = max(worst, float("inf") if mx.isnan(far).any().item() else far.max().item())
    return worst


def tried(kind, rows, out, k, bits, group, dtype, change=lambda text: text, **how):
    home = HOMES[kind]
    x, weights = drawn(rows, out, k, bits, group, dtype)
    assert home.why_not(rows, out, k, bits, group, dtype) is None
    made = multiply(home, home.variant(rows, out, k, bits, group, dtype, **how), x, weights, change)
    return float("inf") if made is None else wrongness(made, x, weights, bits, group)


@pytest.mark.parametrize("kind", HOMES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}x{c[2]}-{c[3]}bit-{c[4]}")
def test_the_product_is_float32s(kind, case):
    assert tried(kind, *case) <= 1


@pytest.mark.parametrize(("tiles", "warps"), [(1, 16), (4, 4)])
def test_every_shape_of_block_gives_the_same(tiles, warps):
    assert tried("cuda", 8, (128,), 2048, 8, 64, mx.bfloat16, tiles=tiles, warps=warps) <= 1


PLAIN = (8, (64,), 2048, 8, 64, mx.bfloat16)
BROKEN = {
    "a scale of the wrong group (cuda)": ("cuda", "scales[row * GROUPS + g]", "scales[row * GROUPS]"),
    "a bias of the wrong row (cuda)": ("cuda", "scales[(row + 24) * GROUPS + g]", "scales[(row + 16) * GROUPS + g]"),
    "no offset of the centred weights (cuda)": ("cuda", "+ SHIFT * s0", ""),
    "a wait that is too weak (cuda)": ("cuda", "wait_copies<STAGES - 2>();", "wait_copies<STAGES - 1>();"),
    "no barrier between lanes (cuda)": ("cuda", "sync_warp();\nfetch_stage", "fetch_stage"),
    "the warps' sums not added up (cuda)": ("cuda", "for (int w = 1; w < WARPS; ++w)", "for (int w = 1; w < 2; ++w)"),
    "a scale of the wrong group (metal)": (
        "metal",
        "widen(scales[long(at) * groups + group])",
        "widen(scales[long(at) * groups])",
    ),
    "weights in another order than x (metal)": ("metal", "decode(words, s + STEPS)", "decode(words, s)"),
    "no barrier between simdgroups (metal)": ("metal", "threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_caught(name):
    kind, right, wrong = BROKEN[name]

    def broken(text):
        assert right in text[0], "the text changed; break it in another way"
        return text[0].replace(right, wrong), text[1]

    assert tried(kind, *PLAIN) <= 1
    assert tried(kind, *PLAIN, change=broken) > 20


def test_a_kernel_that_leaves_places_alone_is_caught():
    assert (
        tried("cuda", 8, (32,), 128, 8, 64, mx.bfloat16, lambda t: (t[0], t[1].replace("int row =", "int row = 16 *")))
        > 20
    )


@pytest.mark.parametrize("kind", HOMES)
def test_shapes_that_are_not_written_say_why(kind):
    home = HOMES[kind]
    for shape, word in (
        ((17, (32,), 128, 8, 64, mx.bfloat16), "rows"),
        ((8, (32,), 128, 6, 64, mx.bfloat16), "bits"),
        ((8, (32,), 128, 8, 128, mx.bfloat16), "groups of 128"),
        ((8, (32,), 128, 8, 64, mx.float32), "float32"),
        ((8, (30,), 128, 8, 64, mx.bfloat16), "30 rows"),
        ((8, (32,), 96, 8, 64, mx.bfloat16), "96 columns"),
    ):
        assert word in home.why_not(*shape)
