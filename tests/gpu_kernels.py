"""Runs the text of our GPU kernels on the CPU: compiled by the host's C++ compiler against stand-ins for the few types and
instructions that it names. A lane of a warp is a fiber, so what only a barrier makes right is wrong without it."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np

from dspark.kernels import cuda, metal

SHIM = Path(__file__).parent / "shim"
BUILDS = Path(tempfile.gettempdir()) / f"dspark-shim-{os.getuid()}"
Text = tuple[str, str]


def multiply(
    home: ModuleType,
    kind: Any,
    x: mx.array,
    weights: Sequence[tuple[mx.array, mx.array, mx.array]],
    change: Callable[[Text], Text] = lambda text: text,
) -> list[mx.array] | None:
    """The products of `kind`'s kernel, in x's number format; None where its threads wait for one another for ever. `change`
    edits the text before it is compiled."""
    launch = build(program(home, kind, change(home.texts(kind)))).launch
    launch.restype = ctypes.c_bool
    held: list[np.ndarray] = []
    call: list[Any] = [pointer(x, held), shape(x), x.ndim]
    for w, scales, biases in weights:
        call += [pointer(w, held), shape(w), pointer(scales, held), pointer(biases, held)]
    # Not a number in every place that the kernel leaves alone.
    made = [np.full((x.shape[0], w.shape[0]), 0x7FFF, np.uint16) for w, _, _ in weights]
    call += [ctypes.c_void_p(y.ctypes.data) for y in made]
    out = [w.shape[0] for w, _, _ in weights]
    threads = 32 * (kind.warps if home is cuda else kind.simds)
    if not launch(home.blocks(kind, out), threads, *call):
        return None
    return [mx.array(y).view(x.dtype) for y in made]


def program(home: ModuleType, kind: Any, text: Text) -> str:
    """C++ with a function `launch` around a kernel's text."""
    header, body = text
    names, types = ["x", "x_shape", "x_ndim"], ["const uint16_t*", "const int*", "int"]
    for i in range(kind.parts):
        names += [f"w{i}", f"w{i}_shape", f"s{i}", f"b{i}"]
        types += ["const uint32_t*", "const int*", "const uint16_t*", "const uint16_t*"]
    names += [f"y{i}" for i in range(kind.parts)]
    types += ["uint16_t*"] * kind.parts
    arguments = ", ".join(f"{t} {n}" for t, n in zip(types, names, strict=True))
    constants = "".join(line + "\n" for line in header.splitlines() if line.startswith("#define"))
    rest = "".join(line + "\n" for line in header.splitlines() if not line.startswith(("#include", "using")))
    if home is cuda:
        start, run = '#include "cuda.hpp"\n', "dspark_qmm::launch"
        body = body.replace("extern __shared__ uint4 shared[];", "")
    else:
        start, run = '#include "metal.hpp"\n#define threadgroup\n', "launch_groups"
        rest += "#undef threadgroup\n#define threadgroup static\n"
    return (
        f"{constants}{start}{rest}static void kernel_body({arguments}) {{\n{body}\n}}\n"
        f'extern "C" bool launch(int blocks, int threads, {arguments}) {{\n'
        f"  return {run}(blocks, threads, [=] {{ kernel_body({', '.join(names)}); }});\n}}\n"
    )


@lru_cache(None)
def build(source: str) -> ctypes.CDLL:
    shims = b"".join(path.read_bytes() for path in sorted(SHIM.glob("*.hpp")))
    name = hashlib.sha256(source.encode() + shims + " ".join(compiler()).encode()).hexdigest()[:16]
    library = BUILDS / f"{name}.so"
    if not library.exists():
        BUILDS.mkdir(exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=BUILDS) as folder:
            text, made = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
            text.write_text(source)
            # A fortified longjmp takes a jump between fibers for a mistake.
            flags = ["-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", "-w", f"-I{SHIM}"]
            done = subprocess.run([*compiler(), *flags, str(text), "-o", str(made)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[:3000]
            made.rename(library)
    return ctypes.CDLL(str(library))


@lru_cache(None)
def compiler() -> list[str]:
    """The host's C++ compiler, or the one that the development dependencies bring."""
    for name in ("g++", "clang++", "c++"):
        if found := shutil.which(name):
            return [found]
    assert importlib.util.find_spec("ziglang"), "no C++ compiler: pip install ziglang"
    return [sys.executable, "-m", "ziglang", "c++"]


def pointer(array: mx.array, held: list[np.ndarray]) -> ctypes.c_void_p:
    """The array's bytes where a copy of 16 may begin."""
    flat = np.ascontiguousarray(np.array(array if array.dtype == mx.uint32 else array.view(mx.uint16))).view(np.uint8)
    room = np.zeros(flat.nbytes + 16, np.uint8)
    aligned = room[-room.ctypes.data % 16 :][: flat.nbytes]
    aligned[:] = flat.ravel()
    held.append(room)
    return ctypes.c_void_p(aligned.ctypes.data)


def shape(array: mx.array) -> Any:
    return (ctypes.c_int * array.ndim)(*array.shape)


HOMES = {"cuda": cuda, "metal": metal}
