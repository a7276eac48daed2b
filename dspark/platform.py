"""What this machine is and which number format it should compute in. Importing it imports no mlx.

`python -m dspark.platform` prints the machine, its backend and its BLAS.
"""

from __future__ import annotations

import hashlib
import os
import platform as _platform
import re
import sys
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from dspark.blas import Blas, open_blas
from dspark.cache import cache_dir
from dspark.errors import InputError

__all__ = ["Blas", "DtypePlan", "Machine", "backend", "cache_dir", "machine", "open_blas", "plan_dtype"]

DTYPES = ("float32", "float16", "bfloat16")
# The system, the KV cache and the activations need the rest.
FLOAT32_SHARE = 0.6


class Machine(NamedTuple):
    """This machine as calibration and telemetry name it. `memory_bytes` is what weights may use at most."""

    backend: str
    chip: str
    architecture: str
    memory_bytes: int
    cores: int
    os: str
    mlx: str
    blas: str

    @property
    def id(self) -> str:
        """A folder name for this machine: the chip in letters, and a digest of all that timings depend on."""
        # In whole GB: what the firmware and the kernel keep for themselves moves with every update.
        stable = self._replace(memory_bytes=round(self.memory_bytes / 1e9))
        digest = hashlib.sha256(repr(tuple(stable)).encode()).hexdigest()[:8]
        return f"{_slug(self.chip)}-{self.backend}-{digest}"


class DtypePlan(NamedTuple):
    """How weights are to be held. `dtype` None keeps what is stored; `dequantise` unpacks quantised ones into it."""

    dtype: str | None
    dequantise: bool
    notes: tuple[str, ...]


def backend() -> str:
    """`metal`, `cuda` or `cpu`: what MLX's default device is. Imports mlx."""
    open_blas()
    import mlx.core as mx

    if mx.default_device().type != mx.DeviceType.gpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def machine() -> Machine:
    """Identify this machine; parts that change from run to run (free memory, PCI ids) are left out. Imports mlx."""
    kind, info = backend(), device_info()
    return Machine(
        backend=kind,
        chip=chip_name(),
        architecture=str(info.get("architecture") or _platform.machine()),
        memory_bytes=memory_total(),
        cores=os.cpu_count() or 1,
        os=f"macOS {_macos_build()}" if sys.platform == "darwin" else _platform.system(),
        mlx=_version("mlx"),
        # On a GPU the BLAS plays no part, and must not make two machines of one.
        blas=open_blas().name if kind == "cpu" else "-",
    )


def device_info() -> dict:
    """MLX's own description of the default device."""
    import mlx.core as mx

    return dict(mx.device_info(mx.default_device()))


@lru_cache(1)
def chip_name() -> str:
    """The chip in words: the GPU's or Apple chip's name, else the CPU model."""
    name = str(device_info().get("device_name") or "").strip()
    return name or _platform.processor() or _platform.machine() or "unknown chip"


def memory_total() -> int:
    """Bytes that weights, caches and the rest can use together: the GPU's, else the machine's or container's memory."""
    kind = backend()
    info = device_info()
    if kind == "metal":
        return int(info.get("max_recommended_working_set_size") or info.get("memory_size") or host_memory_total())
    if kind == "cuda":
        return int(info.get("total_memory") or host_memory_total())
    return host_memory_total()


def memory_available() -> int:
    """Bytes that are free now, at most `memory_total()`."""
    total = memory_total()
    if backend() == "cuda":
        return min(total, int(device_info().get("free_memory") or total))
    return min(total, host_memory_available() or total)


def host_memory_total() -> int:
    """The machine's memory in bytes, or the container's limit where that is smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_limit()
    return min(total, limit) if limit else total


def host_memory_available() -> int | None:
    """Linux's estimate of what can be had without swapping, in bytes; None where the system gives none."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def plan_dtype(asked: str | None, *, packed: bool, float32_nbytes: int, kind: str, blas: Blas, free: int) -> DtypePlan:
    """Choose the number format for weights: `asked` is a dtype's name, `stored`, or None for the platform's rule.

    A GPU keeps what is stored. A CPU computes in float32, for MLX emulates 16-bit products there (20 to 100 times
    slower); quantised weights are dequantised when a real BLAS is open and `float32_nbytes` fit into `free`, because
    MLX's quantised product on a CPU costs the same again for each row, so that a wide verify never pays. Raises
    `InputError` for a name that is no dtype, and for 16 bits on a CPU.
    """
    if asked is not None and asked not in (*DTYPES, "stored"):
        raise InputError(f"dtype {asked!r}: allowed are {', '.join(DTYPES)} and stored")
    if kind != "cpu":
        return DtypePlan(None if asked in (None, "stored") else asked, False, ())
    if asked in ("float16", "bfloat16", "stored"):
        raise InputError(f"dtype {asked!r}: a CPU computes in float32 only, since MLX emulates 16 bits there; drop it")
    if not packed:
        return DtypePlan("float32", False, ())
    size = size_text(float32_nbytes)
    if not blas.real:
        note = f"weights stay packed: dequantised ones are faster only with a real BLAS ({blas.why})"
        return DtypePlan("float32", False, (note,))
    if float32_nbytes > free * FLOAT32_SHARE:
        note = f"weights stay packed: dequantised to float32 they would take {size} of {size_text(free)} free memory"
        return DtypePlan("float32", False, (note,))
    return DtypePlan("float32", True, (f"weights dequantised to float32 ({size}) for the CPU's {blas.name}",))


def size_text(nbytes: int) -> str:
    """A size for a person: `540 MB`, `7.9 GB` (powers of ten, as disks and hubs count)."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"


def _cgroup_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(path).read_text())
        except (OSError, ValueError):
            continue
    return None


def _macos_build() -> str:
    import subprocess

    done = subprocess.run(["sw_vers", "-buildVersion"], capture_output=True, text=True, check=False)
    return f"{_platform.mac_ver()[0]} {done.stdout.strip()}".strip()


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", text.lower())).strip("-") or "machine"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def main() -> None:
    """Print what `machine()` and `open_blas()` found."""
    blas, here = open_blas(), machine()
    print(f"machine  {here.chip}, {size_text(here.memory_bytes)}, {here.os}")
    print(f"backend  {here.backend}, mlx {here.mlx}")
    print(f"BLAS     {blas.name} ({blas.why})")
    print(f"id       {here.id}")


if __name__ == "__main__":
    main()
