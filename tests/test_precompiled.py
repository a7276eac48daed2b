"""CUDA kernels that we compile ourselves: their text with its scalars computes what MLX's way of calling it does, machine code is
kept on disk and made once, and where anything is missing MLX compiles the same text."""

import ctypes
import threading

import mlx.core as mx
import pytest

from dspark.kernels import cuda, enable, gated, gated_probe, nvrtc, precompiled, ways
from dspark.kernels.gated import Gated
from dspark.kernels.linears import Shape
from dspark.kernels.measure import Finding
from dspark.kernels.precompiled import Compiler, Kernel, Program
from tests.gated_kernel import launch_by
from tests.gpu_kernels import multiply
from tests.precompiled_kernel import stand_in
from tests.test_kernel_text import drawn
from tests.test_kernels import block

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
TINY = Program("dspark_qmm", "", "y[0] = n;", ("const int* x",), ("int* y",), ("n",), "if (n < 1) return;", 64)
OTHER = TINY._replace(body="y[0] = 2 * n;")


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    cached = precompiled.kernel, precompiled.compiler, nvrtc.library, cuda.compiled, gated.compiled
    monkeypatch.setattr(precompiled, "_made", {})
    for each in cached:
        each.cache_clear()
    yield
    for each in cached:
        each.cache_clear()


def same(a, b):
    return mx.array_equal(a, b).item()


# ---- the text -------------------------------------------------------------------------------------------------------------

PRODUCTS = [
    (5, (32, 16, 16), 320, 8, 32, BF16),
    (13, (32,), 1024, 4, 32, F16),
]


def products(shape, monkeypatch, change=lambda text: text):
    """What the kernel gives through `ways.own`, and what the body alone gives."""
    x, weights = drawn(*shape)
    kind = cuda.variant(*shape)
    monkeypatch.setattr(cuda, "compiled", lambda kind: stand_in(cuda.program(kind), change))
    modules = [dict(zip(("weight", "scales", "biases"), each, strict=True)) for each in weights]
    made = ways.own(Shape(*shape), "cuda")(x[None], modules)
    return [y[0] for y in made], multiply(cuda, kind, x, weights)


@pytest.mark.parametrize("shape", PRODUCTS, ids=["three matrices", "one"])
def test_products_have_the_bits_of_mlxs_way(monkeypatch, shape):
    made, want = products(shape, monkeypatch)
    assert all(map(same, made, want))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("{rows, columns}", "{rows - 1, columns}"),
        ("{rows, columns}", "{rows, columns - 64}"),
        ("w0_shape[] = {rows0}", "w0_shape[] = {rows1}"),
    ],
)
def test_a_wrong_scalar_is_caught(monkeypatch, right, wrong):
    def broken(text):
        assert right in text
        return text.replace(right, wrong)

    made, want = products(PRODUCTS[0], monkeypatch, broken)
    assert not all(map(same, made, want))


RECURRENCES = [Gated(2, 4, 64, 32, False, BF16, F32, BF16), Gated(1, 2, 32, 64, True, F16, BF16, F32)]


@pytest.mark.parametrize("kind", RECURRENCES, ids=str)
def test_recurrences_have_the_bits_of_mlxs_way(monkeypatch, kind):
    given = gated_probe.drawn(kind, 2, 5)
    # Views, as models hand them on.
    given = given._replace(v=mx.concatenate([given.v, given.v], axis=-1)[..., : kind.dv])
    mask = mx.array([[True, True, True, False, True], [True, False, True, True, True]])

    def all_three():
        updates = [gated.update(kind, *given), gated.update(kind, *given, mask)]
        return [*updates[0], *updates[1], gated.state_behind(kind, *given[1:], None, [3, 5])]

    monkeypatch.setattr(gated, "compiled", lambda variant: stand_in(gated.program(variant)))
    made = all_three()
    monkeypatch.setattr(gated, "launch", launch_by())
    assert all(map(same, made, all_three()))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("k_shape[] = {0, rows, keys}", "k_shape[] = {0, rows - 1, keys}"),
        ("g_strides[] = {1LL * rows * values", "g_strides[] = {1LL * values"),
        ("m_strides[] = {1LL * rows", "m_strides[] = {1LL"),
    ],
)
def test_a_wrong_stride_is_caught(monkeypatch, right, wrong):
    kind, met = RECURRENCES[0], []

    def broken(text):
        met.append(right in text)
        return text.replace(right, wrong)

    monkeypatch.setattr(gated, "compiled", lambda variant: stand_in(gated.program(variant), broken))
    assert not gated_probe.error(kind, 2, 3) <= 1
    assert any(met), "the text changed; break it in another way"


def test_the_text_names_no_header_and_its_name_changes_with_it():
    texts = [cuda.program(cuda.variant(*shape)) for shape in PRODUCTS]
    texts += [gated.program(gated.variant(RECURRENCES[0], given)) for given in ("", "mask", "counts")]
    assert len({program.name for program in texts}) == len(texts)
    for program in texts:
        assert "#include" not in program.text
        assert f'extern "C" __global__ void {program.name}(' in program.text
    assert TINY.name != TINY._replace(shared_bytes=128).name
    assert TINY.name == TINY._replace().name


# ---- on disk --------------------------------------------------------------------------------------------------------------


class Fake:
    """A compiler that counts what it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, text, options):
        self.asked.append(text)
        if "refused" in text:
            raise nvrtc.CompileError("nvrtcCompileProgram gave 6: error")
        return f"code of {hash(text)}".encode()


def compiler(fake, version="13.0", options=("--gpu-architecture=sm_90",)):
    return Compiler(fake, version, options)


def test_code_is_made_once_for_a_text_a_version_and_options():
    fake = Fake()
    first = precompiled.compiled(TINY, compiler(fake))
    assert precompiled.compiled(TINY, compiler(fake)) == first
    assert len(fake.asked) == 1
    precompiled.compiled(OTHER, compiler(fake))
    precompiled.compiled(TINY, compiler(fake, version="13.1"))
    precompiled.compiled(TINY, compiler(fake, options=("--gpu-architecture=sm_100",)))
    assert len(fake.asked) == 4
    assert len({file.name for file in precompiled.folder().iterdir()}) == 4


@pytest.mark.parametrize(
    "broken",
    [
        lambda whole: whole[:-1],
        lambda whole: b"",
        lambda whole: whole[:32],
        lambda whole: whole[:40] + b"x" + whole[41:],
    ],
    ids=["cut short", "empty", "no code", "changed"],
)
def test_a_broken_file_is_made_anew(broken):
    fake = Fake()
    code = precompiled.compiled(TINY, compiler(fake))
    (file,) = precompiled.folder().iterdir()
    file.write_bytes(broken(file.read_bytes()))
    assert precompiled.compiled(TINY, compiler(fake)) == code
    assert len(fake.asked) == 2
    assert precompiled.compiled(TINY, compiler(fake)) == code
    assert len(fake.asked) == 2


def test_a_folder_that_cannot_be_written_costs_only_time(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "file"))
    fake = Fake()
    assert precompiled.compiled(TINY, compiler(fake)) == precompiled.compiled(TINY, compiler(fake))
    assert len(fake.asked) == 2


def test_what_is_refused_is_not_kept():
    fake = Fake()
    assert precompiled.compiled(TINY._replace(body="refused"), compiler(fake)) is None
    assert not precompiled.folder().exists()


def test_many_are_compiled_side_by_side(monkeypatch):
    many = [TINY._replace(body=f"y[0] = {i} * n;") for i in range(3)]
    fake, meeting = Fake(), threading.Barrier(3)

    def make(text, options):
        # Broken after a while where one is begun only when another has ended.
        if "refused" not in text:
            meeting.wait(20)
        return fake(text, options)

    monkeypatch.setattr(precompiled.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(precompiled, "compiler", lambda: compiler(make))
    precompiled.compile_all([*many, many[0], TINY._replace(body="refused")])
    assert sorted(fake.asked) == sorted(program.text for program in [*many, TINY._replace(body="refused")])
    assert precompiled._made == {program: precompiled.compiled(program, compiler(fake)) for program in many}


def test_shapes_are_compiled_ahead_where_there_is_a_kernel_for_them(monkeypatch):
    asked = []
    monkeypatch.setattr(ways, "compile_all", asked.extend)
    written, unwritten = Shape(*PRODUCTS[0]), Shape(8, (30,), 128, 8, 64, BF16)
    ways.compile_own([written, unwritten, RECURRENCES[0], RECURRENCES[0]._replace(dk=48), "something else"])
    given = [gated.program(gated.variant(RECURRENCES[0], given)) for given in ("", "mask", "counts")]
    assert asked == [cuda.program(cuda.variant(*PRODUCTS[0])), *given]


def test_a_bind_has_what_it_will_use_compiled_together(monkeypatch, tmp_path):
    asked, model, file = [], block(), tmp_path / "findings.json"
    monkeypatch.setattr(ways, "compile_own", lambda shapes: asked.append(set(shapes)))
    monkeypatch.setattr(enable, "measure", lambda shape, sets, kind: Finding("cuda" if shape.rows > 1 else "stock"))
    enable.enable(model, 2, probe=False, file=file, kind="cuda").close()
    enable.enable(model, 2, file=file, kind="cuda").close()
    enable.enable(model, 2, file=file, kind="cuda").close()
    every = set(enable.shapes(model, 2))
    asked = [{s for s in shapes if isinstance(s, Shape) and s.rows != enable.PREFILL} for shapes in asked]
    assert asked == [set(), every, {shape for shape in every if shape.rows > 1}]


# ---- calls ----------------------------------------------------------------------------------------------------------------


class Device:
    """A stand-in for `mx.fast.precompiled_cuda_kernel`, which looks at code where it has loaded no module of that name.

    forgetful: looks at it each time; refused: of which code it says that it cannot be loaded.
    """

    def __init__(self, forgetful=False, refused=b""):
        self.forgetful, self.refused, self.loaded, self.calls = forgetful, refused, set(), []

    def __call__(self, **call):
        self.calls.append(call)
        code = call["compiled_source"]
        if (call["name"] not in self.loaded or self.forgetful) and code == self.refused:
            raise RuntimeError("Failed to load compiled kernel")
        self.loaded.add(call["name"])
        shaped = zip(call["output_shapes"], call["output_dtypes"], strict=True)
        return [mx.zeros(shape, dtype) for shape, dtype in shaped]


@pytest.fixture
def device(monkeypatch):
    def put(**how):
        device = Device(**how)
        monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", device)
        return device

    return put


CALL = {
    "inputs": [mx.zeros((4,), mx.int32)],
    "output_shapes": [(4,)],
    "output_dtypes": [mx.int32],
    "scalars": [4],
    "grid": (32, 1, 1),
    "threadgroup": (32, 1, 1),
}


def test_code_goes_along_until_mlx_has_loaded_it(device):
    there = device()
    kernel = Kernel(TINY, b"code")
    kernel(**CALL)
    assert [call["compiled_source"] for call in there.calls] == [b"code", b"", b""]
    # What makes it ready does nothing on the device.
    assert [call["scalars"] for call in there.calls] == [[0], [0], [4]]
    last = there.calls[-1]
    assert (last["name"], last["shared_memory"], last["ensure_row_contiguous"]) == (TINY.name, 64, True)


def test_code_goes_along_at_each_call_where_mlx_asks_for_it(device):
    there = device(forgetful=True)
    kernel = Kernel(TINY, b"code")
    kernel(**CALL)
    assert [call["compiled_source"] for call in there.calls] == [b"code", b"", b"code"]


def test_another_device_gets_the_code(device, monkeypatch):
    there = device()
    kernel = Kernel(TINY, b"code")
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu, 1))
    kernel(**CALL)
    assert there.calls[-1]["compiled_source"] == b"code"


def test_code_that_does_not_load_is_no_kernel(device, monkeypatch):
    monkeypatch.setattr(precompiled, "compiler", lambda: compiler(lambda text, options: b"of another driver"))
    device()
    assert precompiled.kernel(TINY) is not None
    precompiled.kernel.cache_clear()
    device(refused=b"of another driver")
    assert precompiled.kernel(TINY) is None


def test_mlx_compiles_where_we_have_no_kernel(monkeypatch):
    made = []

    def by_mlx(**how):
        made.append(how["name"])
        return lambda **call: pytest.fail("scalars go to our own kernels only") if "scalars" in call else [made[-1]]

    monkeypatch.setattr(mx.fast, "cuda_kernel", by_mlx)
    for each in (cuda.kernel, gated.kernel):
        each.cache_clear()
    x, weights = drawn(*PRODUCTS[1])
    modules = [dict(zip(("weight", "scales", "biases"), weights[0], strict=True))]
    assert precompiled.compiler() is None
    assert ways.own(Shape(*PRODUCTS[1]), "cuda")(x, modules)[0].startswith("dspark_qmm_")
    state = (1, 2, 32, 32)
    kind = gated.variant(RECURRENCES[1])
    assert gated.launch(kind, [mx.zeros((1, 1, 1, 32))], [state], [F32])[0].startswith("dspark_gated_")
    for each in (cuda.kernel, gated.kernel):
        each.cache_clear()
    # With a kernel of ours MLX compiles nothing.
    monkeypatch.setattr(cuda, "compiled", lambda kind: lambda **call: ["ours", *call["scalars"]])
    assert ways.own(Shape(*PRODUCTS[1]), "cuda")(x, modules) == ["ours", 13, 1024, 32]
    assert len(made) == 2


# ---- NVRTC ----------------------------------------------------------------------------------------------------------------


class Library:
    """A stand-in for libnvrtc: code of a text is the text; a text with `wrong` does not compile."""

    def __init__(self):
        self.texts, self.open = {}, 0

    def nvrtcVersion(self, major, minor):
        major._obj.value, minor._obj.value = 13, 1
        return 0

    def nvrtcCreateProgram(self, program, text, name, headers, sources, includes):
        assert (headers, sources, includes) == (0, None, None)
        self.open += 1
        program._obj.value = len(self.texts) + 1
        self.texts[program._obj.value] = text
        return 0

    def nvrtcCompileProgram(self, program, count, options):
        self.options = [options[i].decode() for i in range(count)]
        return 6 if b"wrong" in self.texts[program.value] else 0

    def _get(self, text, size=None, room=None):
        if size is not None:
            size._obj.value = len(text)
        else:
            ctypes.memmove(room, text, len(text))
        return 0

    def nvrtcGetProgramLogSize(self, program, size):
        return self._get(b"a note\nx.cu(3): error: no such thing\n\0", size)

    def nvrtcGetProgramLog(self, program, room):
        return self._get(b"a note\nx.cu(3): error: no such thing\n\0", room=room)

    def nvrtcGetCUBINSize(self, program, size):
        return self._get(self.texts[program.value], size)

    def nvrtcGetCUBIN(self, program, room):
        return self._get(self.texts[program.value], room=room)

    def nvrtcDestroyProgram(self, program):
        self.open -= 1
        return 0


def test_a_text_goes_through_nvrtc_and_nothing_stays_behind():
    library = Library()
    compile = nvrtc.Nvrtc(library)
    assert compile.version == "13.1"
    chosen = nvrtc.options("sm_90")
    assert compile("plain\0text", chosen) == b"plain\0text"
    assert library.options == list(chosen)
    with pytest.raises(nvrtc.CompileError, match=r"gave 6: x\.cu\(3\): error: no such thing"):
        compile("wrong", chosen)
    with pytest.raises(nvrtc.CompileError, match="gave nothing"):
        compile("", chosen)
    assert library.open == 0


def test_an_nvrtc_without_machine_code_is_an_error_of_its_own():
    class Old(Library):
        nvrtcGetCUBINSize = None

    with pytest.raises(nvrtc.CompileError, match="no nvrtcGetCUBINSize"):
        nvrtc.Nvrtc(Old())("text", ())


def test_options_name_the_architecture_and_no_fast_arithmetic():
    assert nvrtc.options("sm_90")[0] == "--gpu-architecture=sm_90"
    assert nvrtc.options("sm_120a")[0] == "--gpu-architecture=sm_120"
    assert nvrtc.options("sm_90")[1:] == ("--std=c++17", "--fmad=true")
    assert nvrtc.options("applegpu_g13s") is None
    assert nvrtc.options("None") is None


def test_the_library_that_mlx_loaded_comes_first(monkeypatch, tmp_path):
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r--p 0 00:01 1   /opt/site/nvidia/cu13/lib/libnvrtc-builtins.so.13.0\n"
        "7f02-7f03 r-xp 0 00:01 2   /opt/site/nvidia/cu13/lib/libnvrtc.so.13\n"
        "7f04-7f05 r-xp 0 00:01 2   /opt/site/nvidia/cu13/lib/libnvrtc.so.13\n"
    )
    monkeypatch.setattr(nvrtc, "LOADED", maps)
    tried = []

    def opened(name):
        tried.append(name)
        if name == "libnvrtc.so.12":
            return Library()
        raise OSError(name)

    monkeypatch.setattr(nvrtc.ctypes, "CDLL", opened)
    assert nvrtc.library().version == "13.1"
    assert tried == ["/opt/site/nvidia/cu13/lib/libnvrtc.so.13", "libnvrtc.so.13", "libnvrtc.so.12"]


def test_no_library_is_no_compiler(monkeypatch):
    monkeypatch.setattr(nvrtc, "_in_process", list)
    monkeypatch.setattr(nvrtc, "SONAMES", ("libdspark-has-none.so",))
    monkeypatch.setattr(nvrtc.ctypes.util, "find_library", lambda name: None)
    monkeypatch.setattr(precompiled, "backend", lambda: "cuda")
    monkeypatch.setattr(precompiled, "device_info", lambda: {"architecture": "sm_90"})
    assert precompiled.compiler() is None
    # The same machine with a library has one, unless its device is none that NVRTC knows.
    nvrtc.library.cache_clear()
    precompiled.compiler.cache_clear()
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", lambda name: Library())
    assert precompiled.compiler().options == nvrtc.options("sm_90")
    precompiled.compiler.cache_clear()
    monkeypatch.setattr(precompiled, "device_info", dict)
    assert precompiled.compiler() is None
