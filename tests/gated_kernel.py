"""Runs the text of the gated delta kernel on the CPU, through the stand-ins of tests/shim: a `launch` like the kernel's own."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from dspark.kernels import gated
from tests.gpu_kernels import Text, build

C_TYPES = {0: "float", 1: "uint16_t", 2: "uint16_t"}


def launch_by(change: Callable[[Text], Text] = lambda text: text) -> Callable[..., list[mx.array]]:
    """A stand-in for `gated.launch`; `change` edits the text before it is compiled. Evaluates what it is given."""

    def launch(kind: Any, inputs: list[mx.array], shapes: list[Any], dtypes: list[mx.Dtype]) -> list[mx.array]:
        run = build(program(kind, change(gated.texts(kind)))).launch
        run.restype = ctypes.c_bool
        held = [spread(array) for array in inputs]
        call: list[Any] = []
        for array, (data, strides) in zip(inputs, held, strict=True):
            call.append(ctypes.c_void_p(data.ctypes.data))
            call += [(ctypes.c_int * array.ndim)(*array.shape), (ctypes.c_longlong * array.ndim)(*strides)]
        # Not a number in every place that the kernel leaves alone.
        made = [
            np.full(math.prod(shape), np.nan if dtype == mx.float32 else 0x7FFF, _numpy(dtype))
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        call += [ctypes.c_void_p(out.ctypes.data) for out in made]
        blocks = gated.blocks(kind, shapes[-1])
        if not run(blocks, 32 * gated.WARPS, *call):
            raise RuntimeError("threads wait for one another for ever")
        return [
            (mx.array(out) if dtype == mx.float32 else mx.array(out).view(dtype)).reshape(shape)
            for out, shape, dtype in zip(made, shapes, dtypes, strict=True)
        ]

    return launch


def spread(array: mx.array) -> tuple[np.ndarray, list[int]]:
    """The array with its axes in another order in memory and its rows apart, as a view would have it, and its steps."""
    plain = np.array(array.view(mx.uint16) if array.dtype in (mx.bfloat16, mx.float16) else array)
    room = np.zeros((*plain.shape[::-1][:-1], plain.shape[0] + 1), plain.dtype)
    view = room.T[: plain.shape[0]]
    view[...] = plain
    return view, [step // plain.itemsize for step in view.strides]


def program(kind: Any, text: Text) -> str:
    header, body = text
    types = {"b": C_TYPES[kind.beta], "g": C_TYPES[kind.gate], "h": "float", "m": "bool", "n": "int"}
    names, arguments = [], []
    for name in gated.input_names(kind):
        arguments += [f"const {types.get(name, C_TYPES[kind.x])}* {name}", f"const int* {name}_shape"]
        arguments.append(f"const long long* {name}_strides")
        names += [name, f"{name}_shape", f"{name}_strides"]
    for name in gated.output_names(kind):
        arguments.append(f"{'float' if name == 'z' else C_TYPES[kind.x]}* {name}")
        names.append(name)
    constants = "".join(line + "\n" for line in header.splitlines() if line.startswith("#define"))
    rest = "".join(line + "\n" for line in header.splitlines() if not line.startswith("#define"))
    joined = ", ".join(arguments)
    return (
        f'{constants}#include "gated.hpp"\n{rest}static void kernel_body({joined}) {{\n{body}\n}}\n'
        f'extern "C" bool launch(int blocks, int threads, {joined}) {{\n'
        f"  return dspark_gated::launch(blocks, threads, [=] {{ kernel_body({', '.join(names)}); }});\n}}\n"
    )


def _numpy(dtype: mx.Dtype) -> Any:
    return np.float32 if dtype == mx.float32 else np.uint16
