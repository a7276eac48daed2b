"""The machine is named alike from run to run, a real BLAS goes first, and a CPU never computes in 16 bits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from dspark import blas, blas_setup, platform
from dspark.blas import Blas, open_blas
from dspark.cache import cache_dir
from dspark.errors import InputError
from dspark.platform import Machine, machine, plan_dtype, size_text

ROOT = Path(__file__).parents[1]
REAL = Blas("openblas", "/lib/libopenblas.so.0", True, "found")
BUNDLED = Blas("bundled", None, False, "the bundled one")
GPU, CPU = "metal", "cpu"


def python(code: str, **env: str) -> subprocess.CompletedProcess:
    """Run code in a process of its own, where nothing is imported yet."""
    changed = {**os.environ, **env}
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=changed, cwd=ROOT)


# BLAS


@pytest.fixture
def linux(monkeypatch, tmp_path):
    """As on Linux in a fresh process: nothing opened, mlx not imported, an empty cache."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delitem(sys.modules, "mlx.core")
    monkeypatch.delenv("DSPARK_BLAS")
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    monkeypatch.setattr(blas, "_opened_already", lambda: None)
    monkeypatch.setattr(blas, "suits_blis", lambda: False)
    monkeypatch.setattr(blas_setup, "suits_blis", lambda: False)
    monkeypatch.setattr(blas, "_state", None)


def test_tests_run_on_the_bundled_blas():
    assert not open_blas().real or sys.platform == "darwin"


def test_candidates_come_in_order_and_the_first_that_opens_is_taken(linux, monkeypatch):
    tried = []
    monkeypatch.setattr(
        blas, "_open_all", lambda files: tried.append(files) or (files[-1] if "mkl" in files[-1] else None)
    )
    found = open_blas()
    assert (found.name, found.real) == ("mkl", True)
    names = [Path(files[-1]).name for files in tried]
    assert names[0] == "libopenblas.so.0"
    assert names[-1] == "libmkl_rt.so"
    fetched = [files for files in tried if len(files) == 3]
    assert [[Path(f).name for f in files] for files in fetched] == [
        ["libquadmath.so.0", "libgfortran.so.5", "libopenblas.so.0"]
    ]
    before = len(tried)
    assert open_blas() is found
    assert len(tried) == before, "it is looked for once"


def test_blis_comes_first_where_it_suits(linux, monkeypatch):
    """With its threads, unless the user said how many; elsewhere it is not looked for."""
    monkeypatch.setattr(blas, "_open_all", lambda files: files[-1])
    monkeypatch.delenv("BLIS_NUM_THREADS", raising=False)
    assert open_blas().name == "openblas"
    assert "BLIS_NUM_THREADS" not in os.environ
    monkeypatch.setattr(blas, "_state", None)
    monkeypatch.setattr(blas, "suits_blis", lambda: True)
    monkeypatch.setenv("BLIS_NUM_THREADS", "3")
    found = open_blas()
    assert (found.name, found.path) == ("blis", str(blas.blis_dir() / "libblis.so.4"))
    assert os.environ["BLIS_NUM_THREADS"] == "3"
    monkeypatch.setattr(blas, "_state", None)
    monkeypatch.delenv("BLIS_NUM_THREADS")
    open_blas()
    assert int(os.environ["BLIS_NUM_THREADS"]) >= 1
    monkeypatch.delenv("BLIS_NUM_THREADS")


@pytest.mark.parametrize(
    ("asked", "spins"),
    [({}, blas.SPINS), ({"GOMP_SPINCOUNT": "9"}, "9"), ({"OMP_WAIT_POLICY": "active"}, None)],
    ids=["nothing", "a count", "a policy"],
)
def test_threads_that_wait_sleep_soon_unless_the_user_says_how_they_wait(linux, monkeypatch, asked, spins):
    monkeypatch.setattr(blas, "_open_all", lambda files: files[-1])
    monkeypatch.setattr(blas, "suits_blis", lambda: True)
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "BLIS_NUM_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    open_blas()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_what_is_missing_is_said_with_the_remedy(linux, monkeypatch):
    monkeypatch.setattr(blas, "_open_all", lambda files: None)
    found = open_blas()
    assert not found.real
    assert "libopenblas0-pthread" in found.why
    assert "make setup" in found.why


def test_none_keeps_the_bundled_one(linux, monkeypatch):
    monkeypatch.setenv("DSPARK_BLAS", "none")
    monkeypatch.setattr(blas, "_open_all", lambda files: files[-1])
    assert open_blas().name == "bundled"


def test_after_mlx_it_is_too_late_and_it_says_so(linux, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx.core", mx)
    monkeypatch.setattr(blas, "_open_all", lambda files: files[-1])
    found = open_blas()
    assert not found.real
    assert "mlx was imported before dspark" in found.why


@pytest.mark.parametrize("choice", ["/no/such/lib.so", "libnosuch.so.9", str(Path(__file__))])
def test_a_choice_that_cannot_be_opened_is_the_users_mistake(linux, monkeypatch, choice):
    monkeypatch.setenv("DSPARK_BLAS", choice)
    with pytest.raises(InputError, match="cannot be opened") as caught:
        open_blas()
    assert choice in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_library_that_is_no_blas_is_refused(linux, monkeypatch):
    import _ctypes

    monkeypatch.setenv("DSPARK_BLAS", _ctypes.__file__)
    with pytest.raises(InputError, match="has no cblas_sgemm"):
        open_blas()


def test_a_real_blas_that_is_chosen_is_opened(linux, monkeypatch):
    class Library:
        cblas_sgemm = 1

    monkeypatch.setenv("DSPARK_BLAS", "~/lib/libmine.so")
    monkeypatch.setattr(blas.ctypes, "CDLL", lambda path, mode: Library())
    assert open_blas() == Blas("chosen", "~/lib/libmine.so", True, "DSPARK_BLAS=~/lib/libmine.so")


def test_openblas_is_told_a_processor_that_it_does_not_know(monkeypatch):
    opened, closed = [], []

    class Library:
        _handle = 77
        cblas_sgemm = 1

        def __init__(self, path, mode):
            opened.append((mode == blas.ctypes.RTLD_GLOBAL, os.environ.get("OPENBLAS_CORETYPE")))

        class openblas_get_corename:
            restype = None

            def __new__(cls):
                return b"Prescott"

    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    monkeypatch.setattr(blas.ctypes, "CDLL", Library)
    monkeypatch.setattr(blas._ctypes, "dlclose", closed.append)
    for avx2, wanted in ((True, [(False, None), (True, "Haswell")]), (False, [(False, None), (True, None)])):
        opened.clear()
        monkeypatch.setattr(blas, "_has_avx2", lambda avx2=avx2: avx2)
        assert blas._try_open("libopenblas.so.0", "cblas_sgemm")
        assert opened == wanted
    assert closed == [77]
    assert "OPENBLAS_CORETYPE" not in os.environ
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Zen")
    opened.clear()
    monkeypatch.setattr(blas, "_has_avx2", lambda: True)
    assert blas._try_open("libopenblas.so.0", "cblas_sgemm")
    assert opened == [(False, "Zen"), (True, "Zen")], "the user's own word stands"


def test_importing_dspark_or_its_platform_imports_no_mlx():
    done = python("import dspark, dspark.platform, sys; print('mlx.core' in sys.modules, 'numpy' in sys.modules)")
    assert done.stdout.split() == ["False", "False"], done.stderr


# Fetching one


def test_setup_says_once_what_to_install_where_it_cannot_fetch(linux, monkeypatch, capsys):
    monkeypatch.setattr(blas, "_open_all", lambda files: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert blas_setup.main() == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "install OpenBLAS" in said.err


def test_setup_ends_at_a_wrong_choice_of_the_users(linux, monkeypatch, capsys):
    monkeypatch.setenv("DSPARK_BLAS", "/no/such/lib.so")
    assert blas_setup.main() == 2
    assert capsys.readouterr().err.startswith("DSPARK_BLAS=/no/such/lib.so: cannot be opened")


def fake_apt(folder: Path, lists: bool, works: bool = True) -> str:
    """apt-get and dpkg that write what the real ones would; without `lists` a download needs an update first."""
    folder.mkdir()
    apt = f"""#!/bin/sh
echo "$@" >> {folder}/calls
case "$*" in
*update*) exit {0 if works else 1} ;;
*Dir::State::Lists*) ;;
*) {"" if lists else "echo 'E: Unable to locate package' >&2; exit 100"} ;;
esac
for word; do case $word in lib*) touch "$word.deb" ;; esac; done
"""
    dpkg = """#!/bin/sh
mkdir -p "$3/usr/lib/here/openblas-pthread"
case "$2" in
*libopenblas*) echo real > "$3/usr/lib/here/openblas-pthread/libopenblasp.so"
    ln -sf libopenblasp.so "$3/usr/lib/here/openblas-pthread/libopenblas.so.0" ;;
*libgfortran*) echo g > "$3/usr/lib/here/libgfortran.so.5" ;;
*libquadmath*) echo q > "$3/usr/lib/here/libquadmath.so.0" ;;
*libblis*) echo blis > "$3/usr/lib/here/libblis.so.4" ;;
*libgomp*) echo omp > "$3/usr/lib/here/libgomp.so.1" ;;
esac
"""
    for name, text in (("apt-get", apt), ("dpkg", dpkg)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return str(folder)


@pytest.mark.parametrize("lists", [True, False])
def test_setup_fetches_openblas_without_root(linux, monkeypatch, tmp_path, capsys, lists):
    monkeypatch.setattr(blas, "_open_all", lambda files: None)
    monkeypatch.setenv("PATH", fake_apt(tmp_path / "bin", lists) + os.pathsep + os.environ["PATH"])
    assert blas_setup.main() == 0
    assert "BLAS: openblas (fetched to" in capsys.readouterr().err
    found = {p.name: p.read_text().strip() for p in blas.fetched_dir().iterdir()}
    assert found == {"libopenblas.so.0": "real", "libgfortran.so.5": "g", "libquadmath.so.0": "q"}
    assert not any(p.is_symlink() for p in blas.fetched_dir().iterdir())
    calls = (tmp_path / "bin" / "calls").read_text()
    assert ("update" in calls) is not lists


@pytest.mark.parametrize("found", [None, "openblas"])
def test_setup_fetches_blis_where_it_suits(linux, monkeypatch, tmp_path, capsys, found):
    """Also where OpenBLAS is there already; what comes before it is better."""
    monkeypatch.setattr(blas_setup, "suits_blis", lambda: True)
    monkeypatch.setattr(blas, "_open_all", lambda files: files[-1] if found else None)
    monkeypatch.setenv("PATH", fake_apt(tmp_path / "bin", lists=True) + os.pathsep + os.environ["PATH"])
    assert blas_setup.main() == 0
    assert "BLAS: blis (fetched to" in capsys.readouterr().err
    assert {p.name: p.read_text().strip() for p in blas.blis_dir().iterdir()} == {
        "libblis.so.4": "blis",
        "libgomp.so.1": "omp",
    }
    assert not blas.fetched_dir().exists()


def test_setup_goes_on_when_packages_cannot_be_had(linux, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(blas, "_open_all", lambda files: None)
    monkeypatch.setenv("PATH", fake_apt(tmp_path / "bin", lists=False, works=False) + os.pathsep + os.environ["PATH"])
    assert blas_setup.main() == 0
    said = capsys.readouterr().err
    assert "could not fetch it (apt-get: no reason given)" in said
    assert "install OpenBLAS" in said
    assert not blas.fetched_dir().exists()


# The machine


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("DSPARK_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "dspark"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "dspark"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/dspark")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_dir() == tmp_path / "Library" / "Caches" / "dspark"
    monkeypatch.setenv("DSPARK_CACHE", "~/mine")
    assert cache_dir() == tmp_path / "mine"


def test_the_machine_is_named_alike_in_every_run():
    here = machine()
    assert here.backend == CPU
    assert here.memory_bytes > 1e8
    assert here.mlx != "unknown"
    code = (
        "import mlx.core as mx; mx.set_default_device(mx.cpu)\nfrom dspark.platform import machine; print(machine().id)"
    )
    assert python(code).stdout.strip() == here.id
    assert here.id == here.id.lower()
    assert set(here.id) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"memory_bytes": 24_100_000_000}, True),
        ({"memory_bytes": 48_000_000_000}, False),
        ({"mlx": "9.9"}, False),
        ({"chip": "Apple M4 Max"}, False),
        ({"blas": "openblas"}, False),
    ],
)
def test_the_name_changes_with_what_timings_depend_on(change, same):
    one = Machine("cpu", "Apple M3 Max", "x", 24_000_000_000, 8, "Linux", "0.32.4", "bundled")
    assert (one._replace(**change).id == one.id) is same
    assert one.id.startswith("apple-m3-max-cpu-")


@pytest.mark.parametrize(
    ("asked", "kind", "blas_found", "packed", "free", "dtype", "dequantise", "note"),
    [
        (None, GPU, BUNDLED, True, 1e9, None, False, ""),
        ("stored", GPU, BUNDLED, True, 1e9, None, False, ""),
        ("bfloat16", GPU, BUNDLED, True, 1e9, "bfloat16", False, ""),
        (None, CPU, REAL, False, 1e9, "float32", False, ""),
        (None, CPU, BUNDLED, False, 1e9, "float32", False, ""),
        (None, CPU, REAL, True, 1e9, "float32", True, "dequantised to float32 (500 MB)"),
        (None, CPU, REAL, True, 6e8, "float32", False, "would take 500 MB of 600 MB free memory"),
        (None, CPU, BUNDLED, True, 1e9, "float32", False, "only with a real BLAS (the bundled one)"),
        ("float32", CPU, REAL, True, 1e9, "float32", True, "dequantised"),
    ],
)
def test_the_number_format_follows_the_machine(asked, kind, blas_found, packed, free, dtype, dequantise, note):
    plan = plan_dtype(asked, packed=packed, float32_nbytes=500_000_000, kind=kind, blas=blas_found, free=int(free))
    assert (plan.dtype, plan.dequantise) == (dtype, dequantise)
    assert note in " ".join(plan.notes)
    assert bool(plan.notes) is bool(note)


@pytest.mark.parametrize("asked", ["float16", "bfloat16", "stored", "float64", "fp16"])
def test_a_cpu_never_computes_in_sixteen_bits(asked):
    with pytest.raises(InputError) as caught:
        plan_dtype(asked, packed=True, float32_nbytes=1, kind=CPU, blas=REAL, free=10**9)
    assert "float32" in str(caught.value)


@pytest.mark.parametrize(("nbytes", "text"), [(540_000_000, "540 MB"), (7_940_000_000, "7.9 GB"), (0, "0 MB")])
def test_sizes_are_written_for_people(nbytes, text):
    assert size_text(nbytes) == text


def test_a_containers_limit_counts(monkeypatch):
    monkeypatch.setattr(platform, "_cgroup_limit", lambda: 123_456_789)
    assert platform.host_memory_total() == 123_456_789
    monkeypatch.setattr(platform, "_cgroup_limit", lambda: 1 << 62)
    assert platform.host_memory_total() < 1 << 60


def test_the_platform_can_be_asked_from_the_shell():
    code = "import mlx.core as mx; mx.set_default_device(mx.cpu)\nfrom dspark.platform import main; main()"
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["machine", "backend", "BLAS", "id"]


# Setup


def setup(tmp_path: Path, *args: str, **env: str) -> subprocess.CompletedProcess:
    command = ["sh", str(ROOT / "scripts" / "setup.sh"), str(tmp_path / "venv"), *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, **env})


def script(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("tools", "args", "says"),
    [
        ({"uname": "[ $1 = -s ] && echo Linux || echo x86_64"}, ("no-such-python",), "there is no no-such-python"),
        (
            {
                "uname": "[ $1 = -s ] && echo Linux || echo x86_64",
                "oldpython": "[ $1 = -V ] && echo Python 3.9.1; exit 1",
            },
            ("oldpython",),
            "oldpython is Python 3.9.1; Python 3.11 or newer is needed",
        ),
        (
            {
                "uname": "[ $1 = -s ] && echo Linux || echo x86_64",
                "bare": "case $2 in *version_info*) exit 0 ;; esac; exit 1",
            },
            ("bare",),
            "bare has no venv module; install it (Debian, Ubuntu: apt install python3-venv)",
        ),
        ({"uname": "echo Plan9"}, (), "MLX runs on macOS and Linux; Plan9 is neither"),
        ({"uname": "[ $1 = -s ] && echo Darwin || echo x86_64"}, (), "MLX needs Apple silicon"),
    ],
)
def test_setup_ends_with_one_clear_sentence(tmp_path, tools, args, says):
    for name, text in tools.items():
        script(tmp_path / "bin", name, text)
    done = setup(tmp_path, *args, PATH=f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"setup: {says}")
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("system", "gpu", "extras"), [("Linux", False, "cpu,dev"), ("Linux", True, "cuda,dev"), ("Darwin", False, "dev")]
)
def test_setup_installs_for_this_platform(tmp_path, system, gpu, extras):
    tools = tmp_path / "bin"
    script(tools, "uname", f"[ $1 = -s ] && echo {system} || echo arm64")
    script(tools, "nvidia-smi", "echo GPU 0: H200" if gpu else "exit 9")
    # A Python that makes a virtual environment with itself in it and writes down what it is asked.
    made = tmp_path / "venv" / "bin"
    text = f'echo "$@" >> {tmp_path}/calls; if [ "$2" = venv ]; then mkdir -p {made}; cp $0 {made}/python; fi'
    script(tools, "fakepython", text)
    done = setup(tmp_path, "fakepython", PATH=f"{tools}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text()
    assert f"install --editable .[{extras}]" in calls
    assert ("dspark.blas_setup" in calls) is (extras == "cpu,dev")
    assert done.stderr.splitlines()[-1].endswith("is ready")


def make(*args: str, **env: str) -> str:
    changed = {**os.environ, **env}
    done = subprocess.run(["make", "-n", *args], capture_output=True, text=True, check=False, cwd=ROOT, env=changed)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_sets_up_again_only_when_something_changed(tmp_path):
    venv = tmp_path / "venv"
    assert "scripts/setup.sh" in make("setup", f"VENV={venv}")
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    (venv / ".dspark-setup").touch()
    assert "scripts/setup.sh" not in make("setup", f"VENV={venv}")
    os.utime(venv / ".dspark-setup", (1, 1))
    assert "scripts/setup.sh" in make("setup", f"VENV={venv}"), "pyproject.toml is newer"
    (venv / ".dspark-setup").touch()
    (venv / "bin" / "python").unlink()
    assert "scripts/setup.sh" in make("setup", f"VENV={venv}"), "its Python is gone"


@pytest.mark.parametrize(
    ("target", "runs"),
    [
        ("run", '-m dspark run smollm2-135m "$PROMPT"'),
        ("test", '-m pytest -m "not slow"'),
        ("test-slow", "-m pytest -m slow"),
        ("test-all", "-m pytest"),
        ("check", "ruff format --check"),
        ("bench", "benchmarks.round"),
        ("docs", "docs/make.py"),
    ],
)
def test_make_targets_run_what_they_promise(tmp_path, target, runs):
    assert runs in make(target, f"VENV={tmp_path}")
