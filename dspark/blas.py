"""Put a real BLAS in front of the one bundled with MLX's Linux CPU build, and fetch one without root.

The bundled one is the reference BLAS: some twenty times slower in a 16-row product. A library opened with RTLD_GLOBAL
before `mlx.core` is imported wins the symbol lookup; opened later it does nothing.
"""

from __future__ import annotations

import _ctypes
import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dspark.cache import cache_dir
from dspark.errors import InputError

OPENBLAS = ("libopenblas.so.0", "libopenblasp.so.0")
MKL = ("libmkl_rt.so", "libmkl_rt.so.2")
# BLIS multiplies a few rows without copying the matrix first, which is much of what OpenBLAS does (docs/performance-notes.md);
# only its OpenMP build, for the other one starts threads in every product.
BLIS = "libblis.so.4"
FETCHED_BLIS = ("libgomp.so.1", BLIS)
# OpenBLAS needs the other two, and a loader that does not know the folder finds them only if they are open already.
FETCHED = ("libquadmath.so.0", "libgfortran.so.5", "libopenblas.so.0")
# What an older OpenBLAS takes a processor for that is newer than itself: kernels without AVX, two to four times slower.
OLD_CORES = ("prescott", "core2", "nehalem", "sandybridge", "barcelona")
REMEDY = "install OpenBLAS (Debian, Ubuntu: libopenblas0-pthread; Fedora: openblas; Arch: openblas) or run `make setup`"


class Blas(NamedTuple):
    """Which BLAS the CPU uses. `real` is False for the bundled reference one; `why` is a sentence for a person."""

    name: str
    path: str | None
    real: bool
    why: str


_state: Blas | None = None


def fetched_dir() -> Path:
    """Where `dspark.blas_setup` puts the libraries that it fetches."""
    return cache_dir() / "blas"


def blis_dir() -> Path:
    """Where `dspark.blas_setup` puts BLIS."""
    return cache_dir() / "blis"


def suits_blis() -> bool:
    """Whether BLIS has kernels for a few rows here that were measured: x86-64 with AVX2."""
    return platform.machine().lower() in ("x86_64", "amd64") and _has_avx2()


def open_blas() -> Blas:
    """Open the BLAS that the CPU is to use, once, and say which; call it before anything imports mlx (some 4 ms).

    `DSPARK_BLAS=none` keeps the bundled one; `DSPARK_BLAS=/path/to/lib.so` opens that file and raises `InputError` when
    it cannot. Otherwise BLIS where it suits, the system's OpenBLAS, the fetched one, then MKL are tried. On macOS Accelerate is
    used anyway.
    """
    global _state
    if _state is None:
        _state = _choose()
    return _state


# How often a thread of a product looks whether the others are done before it sleeps; OpenMP's own answer is some 10 ms. With a busy
# program beside it each would wait for one that has no core: 1.1 tokens/s so, 17 with this, and no difference on a quiet machine
# (docs/performance-notes.md).
SPINS = "300"


def _choose() -> Blas:
    if sys.platform == "darwin":
        return Blas("accelerate", None, True, "macOS's own Accelerate")
    choice = os.environ.get("DSPARK_BLAS", "").strip()
    if choice.lower() == "none":
        return _bundled("DSPARK_BLAS=none asks for it")
    if not sys.platform.startswith("linux"):
        return _bundled("another one is looked for on Linux only")
    if name := _opened_already():
        return Blas(name, None, True, "was opened before dspark")
    if "mlx.core" in sys.modules:
        return _bundled("mlx was imported before dspark, when another one could still be put in front")
    if choice:
        return _open_chosen(choice)
    for name, files in _candidates():
        if name == "blis":
            # It reads this when it is opened, and would take one thread.
            os.environ.setdefault("BLIS_NUM_THREADS", str(len(os.sched_getaffinity(0))))
            if "OMP_WAIT_POLICY" not in os.environ:
                os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
        if path := _open_all(files):
            return Blas(name, path, True, f"found {path}")
    return _bundled(f"no OpenBLAS or MKL was found; {REMEDY}")


def _bundled(reason: str) -> Blas:
    return Blas("bundled", None, False, f"MLX's bundled reference BLAS: {reason}")


def _opened_already() -> str | None:
    # LD_PRELOAD, or another package that opened one globally.
    here = ctypes.CDLL(None)
    if hasattr(here, "openblas_get_config"):
        return "openblas"
    if hasattr(here, "bli_info_get_version_str"):
        return "blis"
    return "mkl" if hasattr(here, "MKL_Get_Max_Threads") else None


def _open_chosen(choice: str) -> Blas:
    try:
        lib = ctypes.CDLL(str(Path(choice).expanduser()) if "/" in choice else choice, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise InputError(f"DSPARK_BLAS={choice}: cannot be opened ({error}); give a library file, or none") from None
    if not hasattr(lib, "cblas_sgemm"):
        raise InputError(f"DSPARK_BLAS={choice}: has no cblas_sgemm, so it is no BLAS; give a library file, or none")
    return Blas("chosen", choice, True, f"DSPARK_BLAS={choice}")


def _candidates() -> Iterator[tuple[str, tuple[str, ...]]]:
    prefix = Path(sys.prefix) / "lib"
    if suits_blis():
        yield "blis", tuple(str(blis_dir() / lib) for lib in FETCHED_BLIS)
    for lib in OPENBLAS:
        yield "openblas", (lib,)
        yield "openblas", (str(prefix / lib),)
    yield "openblas", tuple(str(fetched_dir() / lib) for lib in FETCHED)
    for lib in MKL:
        yield "mkl", (lib,)
        yield "mkl", (str(prefix / lib),)


def _open_all(files: tuple[str, ...]) -> str | None:
    """Open the files in order; the last one is the BLAS, those before it are helpers that may be missing."""
    *helpers, blas = files
    if "/" in blas and not Path(blas).exists():
        return None
    for lib in helpers:
        if Path(lib).exists():
            _try_open(lib)
    return blas if _try_open(blas, "cblas_sgemm") else None


def _try_open(lib: str, symbol: str | None = None) -> bool:
    try:
        if symbol:
            probe = ctypes.CDLL(lib, mode=ctypes.RTLD_LOCAL)
            if not hasattr(probe, symbol):
                return False
            if _taken_for_old(probe):
                return _open_as(lib, "Haswell", probe)
        ctypes.CDLL(lib, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def _taken_for_old(probe: ctypes.CDLL) -> bool:
    if "OPENBLAS_CORETYPE" in os.environ or not hasattr(probe, "openblas_get_corename"):
        return False
    probe.openblas_get_corename.restype = ctypes.c_char_p
    return probe.openblas_get_corename().decode().lower() in OLD_CORES and _has_avx2()


def _has_avx2() -> bool:
    try:
        return " avx2 " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _open_as(lib: str, core: str, probe: ctypes.CDLL) -> bool:
    """Close OpenBLAS and open it again for `core`, which it reads from the environment while it is opened."""
    _ctypes.dlclose(probe._handle)
    # Set for this moment only: other copies of OpenBLAS (numpy's own) know the processor better.
    os.environ["OPENBLAS_CORETYPE"] = core
    try:
        ctypes.CDLL(lib, mode=ctypes.RTLD_GLOBAL)
    finally:
        del os.environ["OPENBLAS_CORETYPE"]
    return True
