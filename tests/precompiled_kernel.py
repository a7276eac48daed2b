"""Runs the whole text of a kernel that we compile ourselves, parameters and scalars included, on the CPU, through tests/shim."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from dspark.kernels.precompiled import Program
from tests.gpu_kernels import build

SIXTEEN = (mx.bfloat16, mx.float16)
SHIMS = {
    "dspark_qmm": "cuda.hpp",
    "dspark_gated": "gated.hpp",
    "dspark_attention": "attention.hpp",
    "dspark_stack": "stack.hpp",
}
FAULTS = {0: "threads wait for one another for ever", 2: "a block wrote behind its shared memory"}
LEFT_ALONE: dict[mx.Dtype, Any] = {mx.float32: (np.nan, np.float32), mx.int32: (-1, np.int32)}


def stand_in(
    program: Program, change: Callable[[str], str] = lambda text: text, written: tuple[int, ...] = ()
) -> Callable[..., list[mx.array]]:
    """A stand-in for a program's `Kernel`; `change` edits the text before it is compiled. Evaluates what it is given. written: the
    inputs that the kernel writes into, where they lie: whoever shares their memory sees it."""

    def kernel(
        *,
        inputs: list[mx.array],
        output_shapes: list[Any],
        output_dtypes: list[mx.Dtype],
        scalars: list[int],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
    ) -> list[mx.array]:
        assert len(inputs) == len(program.inputs)
        assert len(output_shapes) == len(program.outputs)
        assert len(scalars) == len(program.scalars)
        run = build(source(program, change(program.text))).launch
        run.restype = ctypes.c_int
        held = [aligned(plain(array)) for array in inputs]
        # Not a number in every place that the kernel leaves alone.
        made = [
            np.full(shape, *LEFT_ALONE.get(dtype, (0x7FFF, np.uint16)))
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*held, *made)]
        ended = run(grid[0] // threadgroup[0], threadgroup[0], *pointers, *map(ctypes.c_int, scalars))
        for i in written:
            in_place(inputs[i], held[i])
        if ended != 1:
            raise RuntimeError(FAULTS[ended])
        return [
            mx.array(out) if dtype in LEFT_ALONE else mx.array(out).view(dtype)
            for out, dtype in zip(made, output_dtypes, strict=True)
        ]

    return kernel


def source(program: Program, text: str) -> str:
    """C++ with a function `launch` around a program's text."""
    space = program.prefix
    lines = text.replace("extern __shared__ uint4 shared[];", "").splitlines()
    constants = "\n".join(line for line in lines if line.startswith("#define"))
    rest = "\n".join(line for line in lines if not line.startswith("#define"))
    declared = [*program.inputs, *program.outputs, *(f"int {name}" for name in program.scalars)]
    names = [each.split()[-1] for each in declared]
    return (
        f"{constants}\n#define SHARED_BYTES {program.shared_bytes}\n"
        f'#include "{SHIMS[space]}"\n#define __global__\n{rest}\n'
        f'extern "C" int launch(int blocks, int threads, {", ".join(declared)}) {{\n'
        f"  return {space}::launch(blocks, threads, [=] {{ {program.name}({', '.join(names)}); }});\n}}\n"
    )


def plain(array: mx.array) -> np.ndarray:
    return np.ascontiguousarray(np.array(array.view(mx.uint16) if array.dtype in SIXTEEN else array))


def aligned(array: np.ndarray) -> np.ndarray:
    """The array where copies of 16 bytes may begin, as a GPU's memory has it."""
    room = np.zeros(array.nbytes + 16, np.uint8)
    whole = room[-room.ctypes.data % 16 :][: array.nbytes].view(array.dtype).reshape(array.shape)
    whole[...] = array
    return whole


def in_place(array: mx.array, values: np.ndarray) -> None:
    """Writes into an array's own bytes, which other arrays may be views of."""
    bytes_of = lambda a: np.asarray(memoryview(a)).reshape(-1).view(np.uint8)
    bytes_of(array.view(mx.uint16) if array.dtype in SIXTEEN else array)[:] = values.reshape(-1).view(np.uint8)
