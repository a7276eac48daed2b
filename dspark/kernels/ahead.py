"""MLX's own kernels for a model's quantised products on CUDA, compiled side by side before they are needed.

MLX compiles such a kernel when it is first needed and keeps it on disk. One takes a processor some 25 seconds (H200, MLX 0.32),
and a model needs half a dozen, one after the other. `python -m dspark.kernels.ahead JSON` is a worker: it multiplies once, so
that MLX writes that kernel into its cache, from which every other process loads it.

Which kernel MLX takes depends on rows, bits, groups, number format and on whether the matrix divides into tiles. Should its
rules change, a worker compiles what nobody needs, and what is needed is compiled later, as without workers.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from dspark.platform import backend, memory_available

# MLX's kernels begin at 8 rows, below which a product needs none of these, and change behind 16 and 32.
FEWEST_ROWS, ROWS = 8, (16, 32, 64)
# Tiles into which outputs and columns divide, or do not, and columns that have several groups and tiles of any size.
TILE_N, TILE_K, COLUMNS = 128, 64, 256
# A worker that takes longer is given up: several times what a kernel took.
PATIENCE_S = 120.0
# With fewer cores little is gained over compiling what is needed when it is needed.
FEWEST_CORES = 4
# What a process takes on a GPU, at most, before it has computed anything.
WORKER_NBYTES = 10**9
POLL_S = 0.2

Say = Callable[[str], None]


class Job(NamedTuple):
    """A product x [rows, k] by a matrix of n x k, the smallest one that needs the same kernel; dtype: of x and the scales."""

    rows: int
    n: int
    k: int
    bits: int
    group: int
    dtype: str


# What this process has had compiled.
_had: set[Job] = set()


def compile_ahead(
    models: Sequence[Any],
    rows: Iterable[int] = ROWS,
    say: Say = lambda text: None,
    meanwhile: Callable[[], Any] = lambda: None,
) -> None:
    """Have MLX's kernels for products of `rows` rows by the models' quantised linears compiled, once a process.

    Does nothing where the device is no CUDA one, on fewer than 4 cores, and in a model without quantised linears. Takes as
    long as the slowest kernel, and about a second where all are on disk. say: told how far it is; meanwhile: called once
    while workers are at work. What a worker cannot do is left to be compiled when it is needed.
    """
    cores = _cores()
    if cores < FEWEST_CORES or backend() != "cuda":
        return
    wanted = [job for job in jobs(models, rows) if job not in _had]
    _had.update(wanted)
    if wanted:
        most = max(1, min(cores - 1, memory_available() // WORKER_NBYTES))
        work(wanted, most, say, meanwhile)


def jobs(models: Sequence[Any], rows: Iterable[int]) -> list[Job]:
    """One job for each kernel that products of `rows` rows need: those of 8 and more, of a class the largest."""
    # A worker needs none of these.
    from mlx import nn

    from dspark.kernels.linears import rows_of, suits

    linears = [m for model in models for _, m in model.named_modules() if suits(m)]
    heads = {rows_of(m) for m in linears if isinstance(m, nn.QuantizedLinear)}
    classes = {next((c for c in ROWS if count <= c), ROWS[-1]) for count in rows if count >= FEWEST_ROWS}
    found: dict[Job, None] = {}
    for count in sorted(classes):
        for m in linears:
            # An embedding is multiplied by where no linear has its vocabulary.
            idle = isinstance(m, nn.QuantizedEmbedding) and rows_of(m) in heads
            if not idle and mx.issubdtype(m["scales"].dtype, mx.floating):
                columns = m["scales"].shape[1] * m.group_size
                dtype = str(m["scales"].dtype).removeprefix("mlx.core.")
                found[Job(count, *_smallest(rows_of(m), columns, m.group_size), m.bits, m.group_size, dtype)] = None
    return list(found)


def _smallest(n: int, k: int, group: int) -> tuple[int, int]:
    """The size that stands for all matrices whose outputs and columns divide into tiles, or do not, as those of n x k."""
    least = COLUMNS if k % TILE_K == 0 else COLUMNS + group
    return TILE_N if n % TILE_N == 0 else TILE_N // 2, min(k, least)


def few_rows(model: Any) -> None:
    """Forwards of too few rows for any job: MLX compiles what the model has besides products. For `meanwhile`; what cannot be
    computed without caches is left out."""
    with contextlib.suppress(Exception):
        for count in (1, FEWEST_ROWS // 2):
            logits = model(mx.zeros((1, count), mx.int32))
            mx.eval(getattr(logits, "logits", logits))


def work(
    wanted: Sequence[Job],
    most: int,
    say: Say = lambda text: None,
    meanwhile: Callable[[], Any] = lambda: None,
    *,
    command: Callable[[Job], list[str]] | None = None,
    patience_s: float = PATIENCE_S,
) -> None:
    """Run a worker for each job, `most` at a time, until all have ended; whatever ends this ends them. command: the worker's
    command line."""
    command, some = command or _command, f"{len(wanted)} kernel{'' if len(wanted) == 1 else 's'}"
    waiting, running, called = list(wanted), dict[subprocess.Popen[bytes], float](), False
    try:
        while waiting or running:
            while waiting and len(running) < most:
                with contextlib.suppress(OSError):
                    running[_start(command(waiting.pop(0)))] = time.monotonic() + patience_s
            done = len(wanted) - len(waiting) - len(running)
            say(f"MLX compiles {some} for this GPU, once: {done} of {len(wanted)}")
            if not called:
                called = True
                meanwhile()
            time.sleep(POLL_S)
            for process in [p for p, until in running.items() if p.poll() is not None or time.monotonic() > until]:
                _end(process)
                del running[process]
    finally:
        for process in running:
            _end(process)


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    # Modules come from where this process has them, whatever folder it was started in.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    nothing = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, env=environment)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _command(job: Job) -> list[str]:
    return [sys.executable, "-P", "-m", "dspark.kernels.ahead", json.dumps(job)]


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- in a worker --------------------------------------------------------------------------------------------------------


def product(job: Job) -> mx.array:
    """The product that a job names, of zeros: [1, rows, n]."""
    dtype = getattr(mx, job.dtype)
    scales = mx.zeros((job.n, job.k // job.group), dtype)
    return mx.quantized_matmul(
        mx.zeros((1, job.rows, job.k), dtype),
        mx.zeros((job.n, job.k * job.bits // 32), mx.uint32),
        scales,
        mx.zeros_like(scales),
        transpose=True,
        group_size=job.group,
        bits=job.bits,
    )


def main() -> None:
    mx.eval(product(Job(*json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
