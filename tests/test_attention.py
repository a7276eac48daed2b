"""Attention of a few rows by MLX's kernel for single rows: the same numbers, for the instances asked for, where measured faster."""

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from dspark.blas import Blas
from dspark.kernels import attention, enable
from dspark.kernels.attention import Attention, fold, joined, split
from dspark.kernels.attentions import Attentions, kinds
from dspark.kernels.measure import Finding
from dspark.models.heads import Head, HeadConfig, LayerConfig
from dspark.models.target import Target
from tests.families import FAMILIES, build

SHAPES = [(4, 4, 4, 0), (5, 6, 2, 3), (8, 9, 3, 40), (16, 4, 1, 100)]
HEAD = HeadConfig(
    kind="dflash",
    block_size=7,
    anchor_predicts=True,
    mask_token_id=60,
    target_layer_ids=(0, 1),
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    layers=(LayerConfig(), LayerConfig()),
    target_hidden_size=32,
)
# Sums of a few dozen float32 products in another order, on values of about 1.
CLOSE = 1e-5


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Ways are tried as on a GPU, but where a test says otherwise."""
    monkeypatch.setattr(attention, "on_cpu", lambda: False)


def drawn(rows, heads, kv_heads, behind, dim=64):
    return attention.arrays(Attention(rows, heads, kv_heads, dim, True, mx.float32), behind)


def off(a, b):
    return mx.abs(a - b).max().item()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("rows", "heads", "kv_heads", "behind"), SHAPES)
@pytest.mark.parametrize("width", [1, 3, 8])
def test_pieces_are_the_whole(rows, heads, kv_heads, behind, width, sinks):
    q, k, v = drawn(rows, heads, kv_heads, behind)
    extra = mx.random.normal((heads,), key=mx.random.key(9)) if sinks else None
    whole = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask="causal", sinks=extra)
    assert off(split(q, k, v, 0.125, extra, width), whole) < CLOSE
    # Without the mask each row sees them all, which is not the same.
    assert off(mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, sinks=extra), whole) > 100 * CLOSE


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "heads", "kv_heads", "behind"), SHAPES)
def test_heads_that_share_keys_may_be_one_product(rows, heads, kv_heads, behind, causal):
    q, k, v = drawn(rows, heads, kv_heads, behind)
    mask = "causal" if causal else None
    whole = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask=mask)
    assert off(joined(q, k, v, 0.125, causal), whole) < CLOSE
    assert off(joined(q, k, v, 0.125, not causal), whole) > 100 * CLOSE
    # Rows of heads in another order would see other rows' keys.
    turned = joined(q.swapaxes(1, 2).reshape(q.shape), k, v, 0.125, causal)
    assert off(turned, whole) > 100 * CLOSE


def test_a_cpu_with_a_real_blas_joins_heads_where_that_is_faster(tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "on_cpu", lambda: True)
    monkeypatch.setattr(attention, "timed", lambda kind, depth, way: (1.0, 10.0))
    model, file = tiny(), tmp_path / "kernels.json"
    plain = forward(model)
    assert enable.enable(model, 6, kind="cpu", file=file) is None
    monkeypatch.setattr(enable, "open_blas", lambda: Blas("blis", None, True, "a test's"))
    kernels = enable.enable(model, 6, kind="cpu", file=file)
    assert {shape.rows: found.way for shape, found in kernels.attention.items()} == {4: "joined", 8: "joined"}
    assert kernels.findings == {}
    assert off(forward(model), plain) < CLOSE
    kernels.close()
    monkeypatch.setattr(attention, "joined", lambda q, *rest: q)
    kernels = enable.enable(model, 6, kind="cpu", file=file)
    assert off(forward(model), plain) > 100 * CLOSE
    kernels.close()
    # Where each head has keys of its own there is nothing to join.
    assert attention.candidates(Attention(4, 4, 4, 32, True, mx.float32)) == []


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("rows", "heads", "kv_heads", "behind"), SHAPES)
def test_rows_as_heads_are_the_whole(rows, heads, kv_heads, behind, sinks):
    q, k, v = drawn(rows, heads, kv_heads, behind)
    extra = mx.random.normal((heads,), key=mx.random.key(9)) if sinks else None
    whole = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, sinks=extra)
    assert off(fold(q, k, v, 0.125, extra), whole) < CLOSE
    # Rows folded in another order would meet other heads' keys.
    turned = fold(q.swapaxes(1, 2).reshape(q.shape), k, v, 0.125, extra)
    assert off(turned, whole) > 100 * CLOSE


def test_a_piece_of_a_row_is_a_plain_step_bit_for_bit():
    q, k, v = drawn(5, 6, 2, 30)
    rows = split(q, k, v, 0.125, None, 1)
    for i in range(5):
        seen = k.shape[2] - 4 + i
        step = mx.fast.scaled_dot_product_attention(q[:, :, i : i + 1], k[:, :, :seen], v[:, :, :seen], scale=0.125)
        assert mx.array_equal(rows[:, :, i : i + 1], step)


def too_many(q, k, v, scale, *rest):
    """Every row sees the keys of all."""
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale)


@pytest.mark.parametrize("causal", [True, False])
def test_the_probe_tells_right_from_wrong(causal):
    kind = Attention(8, 4, 2, 64, causal, mx.float32)
    right = attention.way_of(kind, Finding("split", 3) if causal else Finding("fold"))
    assert attention.error(kind, right) <= 1
    if causal:
        assert attention.error(kind, too_many) > 1
    assert attention.error(kind, lambda *given: right(*given) + 0.1) > 1
    assert attention.error(kind, lambda *given: right(*given) * mx.nan) == float("inf")


@pytest.mark.parametrize(
    ("took", "found"),
    [([(5, 10), (5, 10)], "split"), ([(5, 10), (11, 10)], "stock"), ([(9.8, 10), (5, 10)], "stock")],
)
def test_a_way_must_be_faster_at_every_depth(monkeypatch, took, found):
    times = dict(zip(attention.DEPTHS, took, strict=True))
    monkeypatch.setattr(attention, "timed", lambda kind, depth, way: times[depth])
    assert attention.measure(Attention(8, 4, 2, 64, True, mx.float32)).way == found


def test_a_wrong_way_is_refused_with_its_reason(monkeypatch):
    monkeypatch.setattr(attention, "timed", lambda *_: (1.0, 10.0))
    monkeypatch.setattr(attention, "split", lambda q, *rest: q)
    found = attention.measure(Attention(8, 4, 2, 64, True, mx.float32))
    assert found.way == "stock"
    assert "tolerance" in found.why


# ---- instances ----------------------------------------------------------------------------------------------------------


def tiny():
    from mlx_lm.models import llama

    mx.random.seed(1)
    args = {
        "model_type": "llama",
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "vocab_size": 90,
    }
    more = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
    return llama.Model(llama.ModelArgs.from_dict(args | more))


def forward(model, cache=None, rows=6):
    cache = cache or make_prompt_cache(model)
    model(mx.array([[5, 7, 9]]), cache=cache)
    return model(mx.array([list(range(10, 10 + rows))]), cache=cache)


def by_threes(kind):
    return attention.way_of(kind, Finding("split", 3)) if kind.causal else None


def test_a_model_with_pieces_says_the_same_and_gets_its_classes_back():
    model, other = tiny(), tiny()
    plain, classes = forward(model), [type(m) for _, m in model.named_modules()]
    calls = []

    def find(kind):
        calls.append(kind)
        return by_threes(kind)

    with Attentions([m for _, m in model.named_modules()], find) as handle:
        assert len(handle.modules) == 2
        assert off(forward(model), plain) < CLOSE
        assert [k.rows for k in calls] == [3, 6]
        assert isinstance(model.layers[0].self_attn, type(other.layers[0].self_attn))
        assert [n for n, _ in tree_flatten(model.parameters())] == [n for n, _ in tree_flatten(other.parameters())]
        # One row, many rows, an array mask and packed keys go on to mlx-lm's own.
        calls.clear()
        forward(model, rows=1)
        forward(model, rows=20)
        forward(model, [QuantizedKVCache(group_size=32, bits=8) for _ in model.layers])
        assert calls == []
    # What the way says is what comes out.
    with Attentions([m for _, m in model.named_modules()], lambda kind: lambda q, *rest: q):
        assert off(forward(model), plain) > 100 * CLOSE
    assert [type(m) for _, m in model.named_modules()] == classes
    assert mx.array_equal(forward(model), plain)


def test_two_handles_close_in_any_order():
    model = tiny()
    plain, klass = forward(model), type(model.layers[0].self_attn)
    modules = [m for _, m in model.named_modules()]
    first, second = Attentions(modules, lambda kind: None), Attentions(modules, by_threes)
    first.close()
    first.close()
    assert type(model.layers[0].self_attn) is not klass
    assert off(forward(model), plain) < CLOSE
    second.close()
    assert type(model.layers[0].self_attn) is klass


def test_the_shapes_of_a_model_are_found_without_computing():
    assert kinds(tiny(), 2) == [Attention(2, 4, 2, 32, True, mx.float32)]


def test_a_model_that_is_called_in_another_way_has_none():
    model = tiny()

    class Other(type(model)):
        def __call__(self, inputs, cache=None):
            raise TypeError("images are missing")

    model.__class__ = Other
    assert kinds(model, 2) == []


def two_blocks(target):
    caches = target.make_caches()
    target(mx.array([[5, 7, 9, 11, 3, 2, 8]]), caches)
    return target(mx.array([[4, 6, 8, 10, 12]]), caches)[0]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["joined", "split"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_says_the_same_another_way(name, way):
    target = Target(build(name))
    plain, finding = two_blocks(target), Finding(way, 3)
    modules = [m for _, m in target.core.named_modules()]
    with Attentions(modules, lambda kind: attention.way_of(kind, finding) if kind.causal else None):
        assert off(two_blocks(target), plain) <= 1e-4 * max(mx.abs(plain).max().item(), 1)
    target.close()


@pytest.mark.slow
def test_most_families_have_attention_that_goes_another_way():
    """The control of the test above: with every row seeing all keys, most of them say something else."""
    differ = 0
    for name in FAMILIES:
        target = Target(build(name))
        plain = two_blocks(target)
        with Attentions([m for _, m in target.core.named_modules()], lambda kind: too_many if kind.causal else None):
            differ += off(two_blocks(target), plain) > 1e-3
        target.close()
    assert differ > 60


# ---- what enable does with it -------------------------------------------------------------------------------------------


def test_enable_measures_attention_once_and_uses_it(tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "timed", lambda kind, depth, way: (1.0, 10.0))
    model, file = tiny(), tmp_path / "kernels.json"
    plain = forward(model)
    kernels = enable.enable(model, 6, kind="cuda", file=file)
    assert {shape.rows: found.way for shape, found in kernels.attention.items()} == {4: "split", 8: "split"}
    assert any("causal" in line and "split by 3 (1 us for 10)" in line for line in kernels.lines())
    assert off(forward(model), plain) < CLOSE
    monkeypatch.setattr(attention, "split", lambda q, *rest: q)
    assert off(forward(model), plain) > 100 * CLOSE
    kernels.close()
    assert mx.array_equal(forward(model), plain)
    monkeypatch.setattr(attention, "measure", None)
    again = enable.enable(model, 6, kind="cuda", file=file)
    assert again.attention == kernels.attention
    again.close()


def test_a_drafters_head_is_measured_for_its_block(tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "timed", lambda kind, depth, way: (1.0, 10.0))
    head = Head(HEAD)
    context = head.absorb(head.make_context(), mx.random.normal((1, 5, 64), key=mx.random.key(2)))
    head.bind(lambda ids: mx.ones((*ids.shape, 32)), lambda x: x)
    plain = head.block(context, mx.array([[3]]))
    kernels = enable.enable(tiny(), 6, kind="cuda", file=tmp_path / "kernels.json")
    kernels.enable_head(head, 7, file=tmp_path / "kernels.json")
    assert off(head.block(context, mx.array([[3]])), plain) < CLOSE
    assert Attention(8, 4, 2, 16, False, mx.float32) in kernels.attention
    kernels.close()
    assert mx.array_equal(head.block(context, mx.array([[3]])), plain)
    # The way is what computes it.
    monkeypatch.setattr(attention, "fold", lambda q, *rest: q)
    kernels.enable_head(head, 7, file=tmp_path / "kernels.json")
    assert off(head.block(context, mx.array([[3]])), plain) > 100 * CLOSE
    kernels.close()
