"""CUDA kernels whose machine code we keep ourselves, for `mx.fast.precompiled_cuda_kernel`: compiled once for a machine.

Where anything is missing (NVRTC, a GPU that it knows, a file that MLX loads) there is no such kernel, and the caller has the same
text compiled by `mx.fast.cuda_kernel`, which gives the same numbers and only starts more slowly.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from dspark.cache import cache_dir
from dspark.kernels import nvrtc
from dspark.platform import backend, device_info

MOST_THREADS = 16


class Program(NamedTuple):
    """A kernel before it is compiled.

    header, body: its text, as `mx.fast.cuda_kernel` takes it; inputs, outputs: their declarations (`const void* x`); scalars:
    names of int parameters behind them; first: statements in front of the body, that make of the scalars what the body asks of
    shapes and strides. With every scalar 0 the kernel must do nothing. shared_bytes: dynamic shared memory of a block; threads: of
    a block at most, 0: unknown.
    """

    prefix: str
    header: str
    body: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    scalars: tuple[str, ...]
    first: str
    shared_bytes: int = 0
    threads: int = 0

    @property
    def name(self) -> str:
        """The function's name and the module's in MLX, which keeps loaded ones by name alone."""
        return f"{self.prefix}_{hashlib.sha256(repr(tuple(self)).encode()).hexdigest()[:16]}"

    @property
    def text(self) -> str:
        parameters = ", ".join([*self.inputs, *self.outputs, *(f"int {name}" for name in self.scalars)])
        bounds = f"__launch_bounds__({self.threads}) " if self.threads else ""
        start = f'extern "C" __global__ void {bounds}{self.name}({parameters})'
        return f"{self.header}{start} {{\n{self.first}\n{self.body}\n}}\n"


class Compiler(NamedTuple):
    """What makes machine code of a text. `version` and `options` belong to the name under which the code is kept."""

    make: Callable[[str, tuple[str, ...]], bytes]
    version: str
    options: tuple[str, ...]


class Kernel:
    """A compiled kernel, called like one of `mx.fast.cuda_kernel`, with its scalars. Views are copied first.

    MLX copies the machine code (some 40 KB) twice at each call, and looks at it only where it has not yet loaded a module of this
    name. So the code goes along once, and nothing where a second call showed that this MLX does without. Raises what MLX raises
    where it does not load the code.
    """

    def __init__(self, program: Program, code: bytes):
        self._fixed: dict[str, Any] = {
            "name": program.name,
            "shared_memory": program.shared_bytes,
            "ensure_row_contiguous": True,
        }
        self._device = mx.default_device()
        self._code = self._sent = code
        self._try(program)
        with contextlib.suppress(Exception):
            self._sent = b""
            self._try(program)
            return
        self._sent = code

    def __call__(self, **call: Any) -> list[mx.array]:
        """inputs, output_shapes, output_dtypes, scalars, grid (in threads), threadgroup: as MLX has them."""
        known = mx.default_device() == self._device
        return mx.fast.precompiled_cuda_kernel(
            compiled_source=self._sent if known else self._code, **self._fixed, **call
        )

    def _try(self, program: Program) -> None:
        """A launch that does nothing."""
        mx.eval(
            self(
                inputs=[mx.zeros((1,), mx.int32)] * len(program.inputs),
                output_shapes=[(1,)] * len(program.outputs),
                output_dtypes=[mx.int32] * len(program.outputs),
                scalars=[0] * len(program.scalars),
                grid=(32, 1, 1),
                threadgroup=(32, 1, 1),
            )
        )


@lru_cache(None)
def kernel(program: Program) -> Kernel | None:
    """The kernel of a program, ready to be called, None where this machine has none."""
    code = _made.get(program) or compiled(program)
    if code is None:
        return None
    try:
        return Kernel(program, code)
    except Exception:  # an MLX, a driver or a device that does not take it: the same text goes another way
        return None


def compile_all(programs: Iterable[Program]) -> None:
    """Have many programs compiled side by side, so that `kernel` finds them. Costs half a second of one core for each that is on
    no disk."""
    wanted = [program for program in dict.fromkeys(programs) if program not in _made]
    if len(wanted) < 2 or compiler() is None:
        return
    with ThreadPoolExecutor(min(len(wanted), os.cpu_count() or 1, MOST_THREADS)) as pool:
        for program, code in zip(wanted, pool.map(compiled, wanted), strict=True):
            if code is not None:
                _made[program] = code


_made: dict[Program, bytes] = {}


@lru_cache(1)
def compiler() -> Compiler | None:
    """The compiler for this machine's GPU, None where there is none."""
    if backend() != "cuda":
        return None
    chosen, library = nvrtc.options(str(device_info().get("architecture"))), nvrtc.library()
    return Compiler(library, library.version, chosen) if library and chosen else None


# ---- on disk ------------------------------------------------------------------------------------------------------------


def folder() -> Path:
    """Where machine code is kept in the user's cache."""
    return cache_dir() / "kernels"


def compiled(program: Program, by: Compiler | None = None) -> bytes | None:
    """The machine code of a program, from disk where it is there and whole; None where it cannot be had. by: instead of this
    machine's compiler."""
    by = by or compiler()
    if by is None:
        return None
    file = folder() / file_name(program, by)
    code = _read(file)
    if code is None:
        try:
            code = by.make(program.text, by.options)
        except nvrtc.CompileError:
            return None
        # A cache that cannot be written costs the next start its time, and nothing else.
        with contextlib.suppress(OSError):
            _write(file, code)
    return code


def file_name(program: Program, by: Compiler) -> str:
    key = "\n".join([program.text, by.version, *by.options])
    return f"{program.prefix}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.cubin"


def _read(file: Path) -> bytes | None:
    """What `_write` wrote, None where it is not there or not whole."""
    try:
        whole = file.read_bytes()
    except OSError:
        return None
    digest, code = whole[:32], whole[32:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def _write(file: Path, code: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    # Another process may read it meanwhile.
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False, suffix=".new") as made:
        made.write(hashlib.sha256(code).digest() + code)
    os.replace(made.name, file)


def contiguous(name: str, shape: Sequence[str]) -> str:
    """Declares the strides of a whole array of this shape in row order, as a body asks for them: `k_strides`."""
    steps = [" * ".join(["1LL", *shape[axis + 1 :]]) for axis in range(len(shape))]
    return f"const long long {name}_strides[] = {{{', '.join(steps)}}};"
