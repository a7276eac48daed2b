"""On CUDA, MLX's kernels for quantised products are compiled by workers, side by side, before anything waits for them."""

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import attrs
import mlx.core as mx
import pytest
from mlx import nn

import dspark.assemble
import dspark.cli.calibrated
from dspark.calibrate import measure as measure_module
from dspark.cli import main, screen
from dspark.kernels import ahead, enable
from dspark.kernels.ahead import Job, jobs, work
from dspark.kernels.measure import Finding
from tests.cli_fake import fake_assemble, uncalibrated
from tests.fakes import HashTarget
from tests.test_measure import Blocks, engine_of

LONG = "import time; time.sleep(600)"


def linear(k=256, n=128, bits=4, group=32, dtype=mx.float16):
    model = nn.Module()
    model.only = nn.QuantizedLinear(k, n, False, group_size=group, bits=bits)
    model.set_dtype(dtype)
    return model


def a_job(number=0):
    return Job(16, 128, 256, 4, 32, f"float{number}")


def python(text):
    """A worker that runs this text; the job is `job`."""
    return lambda job: [sys.executable, "-c", f"import os, sys, time; job = {json.dumps(job)}\n{text}"]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# ---- which kernels ----------------------------------------------------------------------------------------------------


def test_one_job_stands_for_all_products_that_need_its_kernel():
    model = nn.Module()
    model.layers = [linear(576, 1536), linear(576, 1536), linear(1536, 576), linear(576, 192), linear(576, 576)]
    found = jobs([model], (1, 8, 12, 16))
    assert sorted(found) == [Job(16, 64, 256, 4, 32, "float16"), Job(16, 128, 256, 4, 32, "float16")]


@pytest.mark.parametrize(
    "other",
    [{"bits": 8}, {"group": 64}, {"dtype": mx.bfloat16}, {"n": 192}, {"k": 288}],
    ids=lambda other: next(iter(other)),
)
def test_what_needs_another_kernel_is_a_job_of_its_own(other):
    assert len(jobs([linear(), linear()], (8,))) == 1
    assert len(jobs([linear(), linear(**other)], (8,))) == 2


@pytest.mark.parametrize(
    ("rows", "classes"), [((1, 2, 7), []), ((8,), [16]), ((16, 17), [16, 32]), ((32, 33), [32, 64]), ((1024,), [64])]
)
def test_rows_fall_into_the_classes_of_the_kernels(rows, classes):
    assert [job.rows for job in jobs([linear()], rows)] == classes


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("k", [128, 256, 576, 1536, 4096])
@pytest.mark.parametrize("n", [192, 576, 1536, 151936])
def test_the_small_product_divides_into_tiles_as_the_large_one(n, k, group):
    if k % group:
        k += group - k % group
    small_n, small_k = ahead._smallest(n, k, group)
    assert (small_n % 128 == 0, small_k % 64 == 0) == (n % 128 == 0, k % 64 == 0)
    assert small_k % group == 0
    # One group alone is another kernel's.
    assert (small_k > group) == (k > group)
    assert small_n * small_k <= 128 * 288


def test_an_embedding_counts_where_it_is_the_head():
    tied = nn.Module()
    tied.table = nn.QuantizedEmbedding(1000, 64, 64, 8)
    assert [job.bits for job in jobs([tied], (8,))] == [8]
    tied.head = nn.QuantizedLinear(64, 1000, False, 32, 4)
    assert [job.bits for job in jobs([tied], (8,))] == [4]


def test_a_model_without_quantised_linears_has_no_jobs():
    model = nn.Module()
    model.only = nn.Linear(64, 64)
    assert jobs([model], (8, 64)) == []


# ---- a worker ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", jobs([linear(), linear(bits=8, group=64, n=192), linear(dtype=mx.float32)], (8, 17)))
def test_a_worker_multiplies_as_its_job_says(job):
    y = ahead.product(job)
    assert y.shape == (1, job.rows, job.n)
    assert str(y.dtype) == f"mlx.core.{job.dtype}"


def test_a_worker_is_a_program_of_its_own(tmp_path, monkeypatch, capfd):
    """From any folder, and without a word; one that cannot multiply says so by its exit code alone."""
    monkeypatch.chdir(tmp_path)
    assert ahead._start(ahead._command(a_job()._replace(dtype="float32"))).wait() == 0
    assert ahead._start(ahead._command(a_job()._replace(dtype="float32", bits=7))).wait() != 0
    assert capfd.readouterr() == ("", "")


def test_a_worker_imports_no_models():
    code = (
        "import sys, dspark.kernels.ahead; print([m for m in ('mlx.nn', 'mlx_lm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_workers_have_this_process_environment(tmp_path, monkeypatch, capfd):
    """What MLX and dspark look at is the same for a worker; what it prints nobody sees."""
    own = {"MLX_PTX_CACHE_DIR": "/ptx", "CUDA_VISIBLE_DEVICES": "3", "MLX_CUDA_USE_CUDNN_SDPA": "0"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend("/some/modules")
    out = tmp_path / "seen"
    text = f"""
import json
print("out")
print("err", file=sys.stderr)
open({str(out)!r}, "w").write(json.dumps([dict(os.environ), sys.path]))
"""
    work([a_job()], 1, command=python(text))
    seen, path = json.loads(out.read_text())
    assert own.items() <= seen.items()
    assert "/some/modules" in path
    assert capfd.readouterr() == ("", "")


# ---- all of them ------------------------------------------------------------------------------------------------------

# Each notes how many are at work, itself included, and stays until `least` others were seen or all jobs were begun.
MEETING = """
mine = f"{folder}/{os.getpid()}.now"
open(mine, "w").close()
def count(kind): return sum(name.endswith(kind) for name in os.listdir(folder))
open(f"{folder}/{os.getpid()}.begun", "w").close()
most = 0
while most < least and count(".begun") < total:
    most = max(most, count(".now"))
    time.sleep(0.01)
most = max(most, count(".now"))
open(f"{folder}/{os.getpid()}.met", "w").write(str(most))
os.remove(mine)
"""


@pytest.mark.parametrize("most", [1, 2, 3])
def test_workers_run_side_by_side_and_no_more_than_may(tmp_path, most):
    """With one at a time none meets another; with three, three meet, which jobs one after the other would wait for in vain."""
    text = f"folder, least, total = {str(tmp_path)!r}, {most}, 5" + MEETING
    work([a_job(i) for i in range(5)], most, command=python(text))
    met = [int(path.read_text()) for path in tmp_path.glob("*.met")]
    assert (len(met), max(met)) == (5, most)


def test_progress_is_told(tmp_path):
    said = []
    work([a_job(), a_job(1)], 1, said.append, command=python(""))
    assert said[0] == "MLX compiles 2 kernels for this GPU, once: 0 of 2"
    assert said[-1] == "MLX compiles 2 kernels for this GPU, once: 1 of 2"
    work([a_job()], 1, said.append, command=python(""))
    assert said[-1] == "MLX compiles 1 kernel for this GPU, once: 0 of 1"


def test_workers_that_fail_hang_or_do_not_start_are_passed_over(tmp_path):
    """A worker that is given up is killed, and the others' kernels are made all the same."""
    texts = {
        0: "sys.exit(3)",
        1: f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n{LONG}",
        3: f"open({str(tmp_path / 'made')!r}, 'w')",
    }
    missing = lambda job: [str(tmp_path / "nothing")]
    command = lambda job: python(texts[n])(job) if (n := int(job.dtype[5:])) in texts else missing(job)
    # Long enough for Python to start on a busy machine.
    work([a_job(i) for i in range(4)], 1, command=command, patience_s=3.0)
    assert (tmp_path / "made").exists()
    assert not alive(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("where", ["say", "meanwhile"])
def test_an_interruption_ends_the_workers(tmp_path, where):
    pids = []

    def interrupt(*args):
        while len(pids) < 2:
            pids[:] = [int(text) for path in tmp_path.glob("*") if (text := path.read_text())]
            time.sleep(0.01)
        assert all(map(alive, pids))
        raise KeyboardInterrupt

    command = python(f"open(os.path.join({str(tmp_path)!r}, job[-1]), 'w').write(str(os.getpid()))\n{LONG}")
    with pytest.raises(KeyboardInterrupt):
        work([a_job(i) for i in range(3)], 2, command=command, **{where: interrupt})
    assert not any(map(alive, pids))


# ---- when -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def worked(monkeypatch):
    """A CUDA machine of 8 cores, in words; gives what workers are asked for: (jobs, most, progress, meanwhile)."""
    asked = []
    monkeypatch.setattr(ahead, "work", lambda *args: asked.append(args))
    monkeypatch.setattr(ahead, "backend", lambda: "cuda")
    monkeypatch.setattr(ahead, "_cores", lambda: 8)
    monkeypatch.setattr(ahead, "memory_available", lambda: 80 * 10**9)
    monkeypatch.setattr(ahead, "_had", set())
    return asked


def test_each_kernel_is_asked_for_once_a_process(worked):
    ahead.compile_ahead([linear()], (8,))
    ahead.compile_ahead([linear()], (8, 12))
    assert [(args[0], args[1]) for args in worked] == [(jobs([linear()], (8,)), 7)]
    ahead.compile_ahead([linear(), linear(bits=8)], (8, 64))
    assert len(worked) == 2
    assert set(worked[1][0]) == set(jobs([linear(), linear(bits=8)], (8, 64))) - set(worked[0][0])


@pytest.mark.parametrize(
    ("name", "value"), [("backend", lambda: "cpu"), ("backend", lambda: "metal"), ("_cores", lambda: 3)]
)
def test_nothing_is_done_elsewhere_and_on_few_cores(worked, monkeypatch, name, value):
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(ahead, name, value)
        ahead.compile_ahead([linear()], (8,))
    assert worked == []
    ahead.compile_ahead([linear()], (8,))
    assert len(worked) == 1


def test_workers_find_room_on_the_gpu(worked, monkeypatch):
    for room, most in ((3 * 10**9, 3), (0, 1), (99 * 10**9, 7)):
        monkeypatch.setattr(ahead, "memory_available", lambda room=room: room)
        monkeypatch.setattr(ahead, "_had", set())
        ahead.compile_ahead([linear()], (8,))
        assert worked[-1][1] == most


def test_a_forward_of_few_rows_runs_while_workers_are_at_work(tmp_path):
    seen = []

    def model(ids):
        seen.append(ids.shape)
        return mx.zeros(())

    begun = lambda: ahead.few_rows(model)
    work([a_job()], 1, lambda text: seen.append(text[-6:]), begun, command=python(""))
    assert seen[:3] == ["0 of 1", (1, 1), (1, 4)]
    assert all(rows < ahead.FEWEST_ROWS for _, rows in seen[1:3])
    ahead.few_rows(lambda ids: 1 / 0)


def probed(monkeypatch):
    """What a probe does, in order, with neither workers nor measurements."""
    events = []
    monkeypatch.setattr(enable, "compile_ahead", lambda models, **how: events.append(("ahead", models)))
    monkeypatch.setattr(enable, "time", SimpleNamespace(monotonic=lambda: events.append("clock") or 0.0))
    monkeypatch.setattr(enable, "measure", lambda *args: events.append("measured") or Finding("stock"))
    return events


def test_kernels_are_compiled_before_a_probe_s_patience_begins(tmp_path, monkeypatch):
    events, model, file = probed(monkeypatch), linear(), tmp_path / "kernels.json"
    enable.enable(model, 2, kind="cuda", file=file).close()
    assert events[:3] == [("ahead", [model]), "clock", "clock"]
    assert "measured" in events
    # All is known now.
    events.clear()
    enable.enable(model, 2, kind="cuda", file=file).close()
    assert events == []


def test_what_measures_nothing_on_cuda_compiles_nothing(tmp_path, monkeypatch):
    events, model = probed(monkeypatch), linear()
    enable.enable(model, 2, kind="cuda", file=tmp_path / "a.json", probe=False).close()
    enable.enable(model, 2, kind="metal", file=tmp_path / "b.json").close()
    assert "measured" in events
    assert ("ahead", [model]) not in events


def test_a_calibration_compiles_what_its_widths_and_drafters_need(monkeypatch):
    @attrs.frozen
    class Network(Blocks):
        head: nn.Module = attrs.field(factory=lambda: linear(bits=8))

    target, told = HashTarget(), []
    target.model = linear()
    engine = engine_of(Network(), target)

    def compiled(models, rows, say):
        assert [job.bits for job in jobs(models, (8,))] == [4, 8]
        assert {job.rows for job in jobs(models, rows)} == {16, 64}
        say("compiling")

    monkeypatch.setattr(measure_module, "compile_ahead", compiled)
    measure_module.measure(engine, budget_s=0.01, progress=lambda done, total, what: told.append(what))
    assert told[0] == "compiling"
    assert told.count("compiling") == 1
    assert any(what.startswith("verify") for what in told)


@pytest.mark.parametrize("command", [("run", "lookup", "hi"), ("run", "lookup", "hi", "--quiet")])
def test_a_command_says_what_it_waits_for(monkeypatch, capfd, command):
    made = fake_assemble("The sea.")

    def assemble(recipe, *, say, **how):
        say("MLX compiles")
        return made(recipe, **how)

    monkeypatch.setattr(dspark.assemble, "assemble", assemble)
    monkeypatch.setattr(dspark.cli.calibrated, "calibrated", uncalibrated)
    monkeypatch.setattr(screen, "LOG_EVERY_S", -1.0)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert main(list(command)) == 0
    assert ("MLX compiles" in capfd.readouterr().err.splitlines()) == ("--quiet" not in command)
