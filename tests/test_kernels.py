"""Other kernels for a model's quantised linears: on for chosen instances while a handle is open, and only where a probe on
this machine found them right and faster."""

import copy
import subprocess
import sys
import threading
from types import SimpleNamespace

import attrs
import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from dspark.kernels import enable, measure, store, ways
from dspark.kernels.enable import Kernels, shapes
from dspark.kernels.linears import Linears, Shape
from dspark.kernels.measure import Finding
from dspark.models.hooks import AbstractWatch, Hooks, watching


class Block(nn.Module):
    """Linears as attention and MLP call them: q, k and v on one array, o alone with a bias, a tied head."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(64, 64, False),
            nn.Linear(64, 32, False),
            nn.Linear(64, 32, False),
        )
        self.o_proj, self.table = nn.Linear(64, 64), nn.Embedding(96, 64)

    def __call__(self, x):
        mixed = self.q_proj(x) + mx.concatenate([self.k_proj(x), self.v_proj(x)], axis=-1)
        return self.table.as_linear(self.o_proj(mixed))


def block(dtype=mx.bfloat16):
    mx.random.seed(3)
    model = Block()
    model.o_proj.bias = mx.random.normal((64,))
    model.set_dtype(dtype)
    nn.quantize(model, group_size=32, bits=8)
    mx.eval(model.parameters())
    return model


def rows(count, dtype=mx.bfloat16):
    return mx.random.normal((1, count, 64), key=mx.random.key(count)).astype(dtype)


class Counting:
    """Finds MLX's own product for every shape, `factor` times, and keeps what was asked and called."""

    def __init__(self, factor=1.0):
        self.factor, self.asked, self.calls = factor, [], []

    def __call__(self, shape):
        self.asked.append(shape)

        def way(x, modules):
            self.calls.append(shape.out)
            return [y * self.factor for y in ways.stock(shape)(x, modules)]

        return way


def same(a, b):
    return mx.array_equal(a, b).item()


# ---- instances ------------------------------------------------------------------------------------------------------------


def test_products_go_another_way_while_the_handle_is_open():
    model, x = block(), rows(4)
    before = model(x)
    with Linears(model, Counting()):
        assert same(model(x), before)
    # Doubling every product doubles what q, k and v give, so the text of the model is really computed this way.
    with Linears(model, Counting(factor=2.0)):
        assert not same(model(x), before)
    assert same(model(x), before)


def test_linears_that_share_their_input_are_one_call():
    model, way = block(), Counting()
    with Linears(model, way):
        model(rows(4))
    assert way.calls == [(64, 32, 32), (64,), (96,)]
    way.calls.clear()
    with Linears(model, way, fuse=False):
        model(rows(4))
    assert way.calls == [(64,), (32,), (32,), (64,), (96,)]


def test_instances_without_another_way_stay_as_they_are():
    model, way = block(), Counting()
    classes = [type(m) for _, m in model.named_modules()]
    with Linears(model, way, worth=lambda matrix: False):
        assert [type(m) for _, m in model.named_modules()] == classes
    with Linears(model, way, worth=lambda matrix: matrix[0] == (64, 32, 32)) as handle:
        assert {id(m) for m in handle.modules} == {id(m) for m in (model.q_proj, model.k_proj, model.v_proj)}
        model(rows(4))
    assert way.calls == [(64, 32, 32)]


def test_siblings_called_on_other_arrays_compute_their_own():
    model, way = block(), Counting()
    a, b = rows(2), rows(2) + 1
    want = model.k_proj(b), model.q_proj(a), model.v_proj(a)
    with Linears(model, way):
        got = [model.k_proj(b), model.q_proj(a), model.v_proj(a)]
        assert all(map(same, got, want))
        # What q laid by for k was made from `a`, and is not k's answer to another array with the same values.
        way.calls.clear()
        assert same(model.k_proj(b), want[0])
        assert way.calls == [(32,)]


def test_threads_do_not_mix_what_they_laid_by():
    model = block()
    xs = [rows(3) + i for i in range(4)]
    want, got = [model(x) for x in xs], [None] * 4
    mx.eval(want)
    with Linears(model, Counting()):

        def work(i):
            for _ in range(20):
                # An array of this thread's own: streams belong to threads.
                with mx.stream(mx.cpu):
                    got[i] = model(xs[i])
                    mx.eval(got[i])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(map(same, got, want))


def test_a_model_looks_the_same_from_outside(tmp_path):
    model, plain = block(), block()
    with Linears(model, Counting()):
        assert isinstance(model.q_proj, nn.QuantizedLinear)
        assert isinstance(model.table, nn.QuantizedEmbedding)
        assert repr(model) == repr(plain)
        assert type(model.q_proj).__name__ == "QuantizedLinear"
        names = [name for name, _ in tree_flatten(model.parameters())]
        assert names == [name for name, _ in tree_flatten(plain.parameters())]
        model.save_weights(str(tmp_path / "w.safetensors"))
        assert sorted(mx.load(str(tmp_path / "w.safetensors"))) == sorted(names)
        twin = copy.deepcopy(model.q_proj)
        assert type(twin) is nn.QuantizedLinear
    assert type(model.q_proj) is nn.QuantizedLinear
    assert type(model.table) is nn.QuantizedEmbedding


def test_handles_close_in_any_order():
    model, x = block(), rows(2)
    before = model(x)
    first, second = Linears(model, Counting()), Linears(model, Counting(2.0))
    assert same(model(x), before)
    first.close()
    assert not same(model(x), before)
    second.close()
    second.close()
    assert same(model(x), before)
    assert type(model.q_proj) is nn.QuantizedLinear


class Seen(AbstractWatch):
    def __init__(self):
        self.modules = []

    def called(self, module, call, args, kwargs):
        self.modules.append(module)
        return call(module, *args, **kwargs)


@pytest.mark.parametrize("linears_first", [True, False])
def test_hooks_and_kernels_share_an_instance(linears_first):
    model, x, hooks, seen = block(), rows(2), Hooks(), Seen()
    before = model(x)
    if not linears_first:
        hooks.add([model.o_proj])
    linears = Linears(model, Counting())
    if linears_first:
        hooks.add([model.o_proj])
    with watching(seen):
        assert same(model(x), before)
    assert seen.modules == [model.o_proj]
    for close in (linears.close, hooks.close) if linears_first else (hooks.close, linears.close):
        close()
        assert same(model(x), before)
    assert isinstance(model.o_proj, nn.QuantizedLinear)


def test_what_the_kernels_are_not_for_is_left_alone():
    way = Counting()
    wide, other = block(), block(mx.float32)
    with Linears(wide, way), Linears(other, way):
        wide(rows(17))
        # Scales in another number format than the input.
        other.q_proj(rows(2, mx.bfloat16))
    assert way.calls == []
    mixed = nn.Sequential(nn.QuantizedLinear(64, 64, group_size=32, bits=4, mode="mxfp4"), nn.Linear(64, 64))
    assert Linears(mixed, way).modules == []


# ---- the probe ------------------------------------------------------------------------------------------------------------

SHAPE = Shape(4, (64, 32, 32), 64, 8, 32, mx.bfloat16)
# MLX's own product on a CPU is as exact as the tolerance asks in float32 only.
PROBED = SHAPE._replace(dtype=mx.float32)


def wrong_scales(shape):
    """The stock product with every scale of a row one group further, as a kernel with a broken index would have it."""

    def way(x, modules):
        shifted = [
            {"weight": m["weight"], "scales": mx.roll(m["scales"], 1, axis=-1), "biases": m["biases"]} for m in modules
        ]
        return ways.stock(shape)(x, shifted)

    return way


def broken(shape):
    def way(x, modules):
        raise RuntimeError("Failed to compile kernel:\nno such instruction")

    return way


@pytest.fixture
def tried(monkeypatch):
    """Measures with a stand-in for our kernel, and with times that are given."""

    def attempt(own, us):
        monkeypatch.setattr(ways, "own", lambda shape, kind: own(shape))
        monkeypatch.setattr(ways, "why_not", lambda shape, kind: None)
        monkeypatch.setattr(measure, "timed", lambda candidates, x, sets: {key: us[key[0]] for key in candidates})
        model = block(mx.float32)
        return measure.measure(PROBED, [(model.q_proj, model.k_proj, model.v_proj)], "cuda")

    return attempt


def test_a_right_and_faster_kernel_is_taken(tried):
    found = tried(ways.stock, {"stock": 100.0, "padded": 90.0, "cuda": 20.0})
    assert (found.way, found.us, found.stock_us, found.why) == ("cuda", 20.0, 100.0, "")
    assert found.worst <= 1


@pytest.mark.parametrize(
    ("own", "us", "way", "why"),
    [
        (wrong_scales, {"stock": 100.0, "padded": 99.0, "cuda": 1.0}, "stock", "wrong on this machine"),
        (broken, {"stock": 100.0, "padded": 40.0}, "padded", "no such instruction"),
        (ways.stock, {"stock": 100.0, "padded": 110.0, "cuda": 99.0}, "stock", "99 us a call"),
    ],
    ids=["wrong", "does not compile", "no faster"],
)
def test_any_other_is_not_and_the_reason_is_kept(tried, own, us, way, why):
    found = tried(own, us)
    assert found.way == way
    assert why in found.why


def test_padding_gives_the_rows_that_were_asked_for():
    model, x = block(), rows(3)
    want = ways.stock(SHAPE)(x, [model.q_proj])[0]
    assert same(ways.padded(SHAPE._replace(rows=3), 8)(x, [model.q_proj])[0], want)


def test_the_real_clock_times_every_way_once_it_is_compiled():
    model, x = block(), rows(2)
    shape = SHAPE._replace(rows=2)
    took = measure.timed({("stock", 0): ways.stock(shape)}, x, [(model.q_proj, model.k_proj, model.v_proj)])
    assert took["stock", 0] > 0


# ---- what is kept, and turned on ------------------------------------------------------------------------------------------


def test_each_timed_call_waits_for_the_one_before():
    fed = []

    def way(x, modules):
        fed.append(x)
        return [x[..., :2], x]

    measure.timed({("stock", 0): way}, rows(4), [()])
    # The first call of each evaluation gets x itself, all others what came of the last one.
    assert len({id(x) for x in fed}) == 1 + (measure.REPEATS + 1) * (measure.CALLS - 1)


def test_findings_are_kept_for_this_machine_and_these_kernels(tmp_path, monkeypatch):
    file = tmp_path / "kernels.json"
    store.write({"a": Finding("cuda", 0, 1.5, 3.0, 0.25)}, file)
    store.write({"b": Finding("stock", why="slow")}, file)
    assert store.read(file) == {"a": Finding("cuda", 0, 1.5, 3.0, 0.25), "b": Finding("stock", why="slow")}
    with monkeypatch.context() as patch:
        patch.setattr(store, "here", lambda: "another machine")
        assert store.read(file) == {}
    with monkeypatch.context() as patch:
        patch.setattr(store, "shortened", lambda name: "another text")
        assert store.read(file) == {}
    file.write_text("{")
    assert store.read(file) == {}


def test_a_model_is_measured_once(tmp_path, monkeypatch):
    file, measured = tmp_path / "kernels.json", []

    def found(shape, sets, kind):
        measured.append(shape)
        return Finding("padded", 8, 1.0, 2.0) if shape.rows > 1 else Finding("stock", why="slow")

    monkeypatch.setattr(enable, "measure", found)
    model, x = block(), rows(2)
    before = model(x)
    assert enable.enable(model, 2, kind="cuda", file=file, probe=False).missing == 6 + 3, "prefills are measured apart"
    kernels = enable.enable(model, 2, kind="cuda", file=file)
    assert len(measured) == len(set(measured)) == 6
    assert same(model(x), before)
    kernels.close()
    again = enable.enable(model, 2, kind="cuda", file=file)
    assert len(measured) == 6
    assert again.findings == kernels.findings
    again.close()


@pytest.mark.parametrize("launched", [True, False])
def test_a_drafters_products_are_measured_for_its_block(tmp_path, monkeypatch, launched):
    """And those of the table that it borrows, where the target's forwards are launches, which leave it alone."""
    measured, head, table = [], block(), block().o_proj
    head.layers, head.config, head.launch = [], SimpleNamespace(lm_head="borrowed", kind="dspark"), None

    def found(shape, sets, kind):
        measured.append(shape)
        return Finding("padded", 8, 1.0, 2.0)

    monkeypatch.setattr(enable, "measure", found)
    target = SimpleNamespace(lm_head_raw=table)
    launches = SimpleNamespace(
        on=launched, target=target, enable_head=lambda *a, **k: None, close=lambda: None, lines=list
    )
    x, wide = rows(7), rows(12)
    plain = [head(x), head(wide), table(x)]
    kernels = Kernels(block(), "cuda", {}, launches=launches)
    kernels.enable_head(head, 7, file=tmp_path / "kernels.json")
    assert {shape.rows for shape in measured} == {7}
    assert len(measured) == 3, "q, k and v as one; o, whose shape the table has too; the tied embedding"
    assert (type(table) is not nn.QuantizedLinear) == launched
    padded = ways.padded
    asked = []
    monkeypatch.setattr(ways, "padded", lambda shape, width: asked.append(shape) or padded(shape, width))
    assert all(mx.allclose(a, b, atol=1e-2) for a, b in zip([head(x), head(wide), table(x)], plain, strict=True))
    assert {shape.rows for shape in asked} == {7}
    kernels.close()
    assert type(table) is type(head.o_proj) is nn.QuantizedLinear
    assert all(map(same, [head(x), head(wide), table(x)], plain))


def test_prompts_are_read_by_a_plain_product_where_its_bits_are_mlxs_own(tmp_path, monkeypatch):
    """And where it is faster. Not by any other, nor by this one at the rows of a draft."""
    file, asked = tmp_path / "kernels.json", []
    gemm, stock = ways.gemm, ways.stock
    kept = lambda way: lambda x, modules: asked.append(x.shape[1]) or way(x, modules)
    monkeypatch.setattr(enable, "measure", lambda *a: Finding("stock"))
    monkeypatch.setattr(
        measure, "timed", lambda candidates, x, sets: {key: 1.0 + (key[0] == "stock") for key in candidates}
    )
    # Bits are alike where both are the same product; MLX's own differ by its device's rounding.
    monkeypatch.setattr(ways, "gemm", lambda shape: kept(stock(shape)))
    model = block()
    kernels = enable.enable(model, 2, kind="cuda", file=file)
    assert {shape.rows for shape, found in kernels.findings.items() if found.way == "gemm"} == {enable.PREFILL}
    asked.clear()
    for count in (2, 16, 40, 64, 300):
        model(rows(count))
    assert set(asked) == {64, 300}
    kernels.close()
    for way, us in ((lambda shape: lambda x, m: [y + 1 for y in stock(shape)(x, m)], 1.0), (stock, 2.0)):
        monkeypatch.setattr(ways, "gemm", way)
        monkeypatch.setattr(measure, "timed", lambda candidates, x, sets, us=us: {("stock", 0): 2.0, ("gemm", 0): us})
        found = enable.enable(model, 2, kind="cuda", file=tmp_path / f"{us}.json")
        assert {f.way for s, f in found.findings.items() if s.rows == enable.PREFILL} == {"stock"}
        assert all("gemm" in f.why for s, f in found.findings.items() if s.rows == enable.PREFILL)
        found.close()
    monkeypatch.setattr(ways, "gemm", gemm)
    x, shape = rows(64), SHAPE._replace(rows=64)
    modules = (model.q_proj, model.k_proj, model.v_proj)
    for a, b in zip(gemm(shape)(x, modules), stock(shape)(x, modules), strict=True):
        assert mx.allclose(a, b, atol=0.1, rtol=0.05), "it is the same product"


def test_impatience_leaves_the_rest_to_a_later_bind(tmp_path, monkeypatch):
    """The largest matrix is measured first; what is left keeps MLX's kernels, is counted, and is measured next time."""
    file, measured = tmp_path / "kernels.json", []

    def found(shape, sets, kind):
        measured.append(shape)
        return Finding("stock", why="slow")

    monkeypatch.setattr(enable, "measure", found)
    monkeypatch.setattr(enable, "PATIENCE_S", -1.0)
    every = shapes(block(), 2)
    assert enable.enable(block(), 2, kind="cuda", file=file).missing == len(every) + 3
    monkeypatch.setattr(enable, "PATIENCE_S", 60.0)
    assert enable.enable(block(), 2, kind="cuda", file=file).missing == 0
    assert set(measured) == set(every)
    sizes = [shape.k * sum(shape.out) for shape in measured]
    assert sizes == sorted(sizes, reverse=True)


def test_other_counts_go_the_way_of_the_next_one_measured():
    for rows_, stands in ((1, 1), (2, 2), (3, 4), (5, 7), (6, 7), (7, 7), (8, 8), (9, 12), (16, 16), (17, 17)):
        assert enable.measured_for(rows_) == stands
    found = {SHAPE._replace(rows=7): Finding("padded", 8, 1.0, 2.0), SHAPE._replace(rows=8): Finding("stock")}
    kernels = Kernels(block(), "cuda", found)
    assert kernels._find(SHAPE._replace(rows=5)) is not None
    assert kernels._find(SHAPE._replace(rows=8)) is None
    assert kernels._find(SHAPE._replace(rows=3)) is None
    kernels.close()


def test_shapes_are_those_that_a_forward_multiplies():
    model, way = block(), Counting()
    with Linears(model, way):
        model(rows(1))
        model(rows(2))
    assert set(shapes(model, 2)) == set(way.asked)


def test_explain_says_what_is_on_and_why_not():
    findings = {
        SHAPE._replace(rows=1): Finding("stock", why="30 us a call"),
        SHAPE._replace(rows=2): Finding("cuda", 0, 20.0, 100.0),
        SHAPE: Finding("cuda", 0, 21.0, 140.0),
    }
    kernels = Kernels(block(), "cuda", findings, missing=2)
    assert kernels.lines() == [
        "2 of 3 shapes by other kernels than MLX's own, as measured here; 2 shapes not measured",
        "64 -> 64+32+32, 8 bits, group 32, bfloat16: rows 1 stock (30 us a call); rows 2-4 cuda (21 us for 140)",
    ]
    kernels.close()


def test_a_cpu_changes_nothing_and_loads_nothing():
    assert enable.enable(block(), 8) is None
    code = (
        "import sys, mlx.core as mx; mx.set_default_device(mx.cpu); from dspark import assemble;"
        "assert assemble._kernels(object(), None, True) is None;"
        "print([m for m in sys.modules if m.startswith('dspark.kernels')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_findings_are_frozen():
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Finding("stock").way = "cuda"  # type: ignore[misc]
