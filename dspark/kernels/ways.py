"""Ways to multiply a few rows by quantised matrices: the stock kernel, the stock kernel with rows added, our own kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from dspark.kernels import cuda, gated, metal, own_attention
from dspark.kernels.linears import Shape, Way
from dspark.kernels.precompiled import Program, compile_all

# Widths to which rows may be padded: where kernels that read the weights once have begun so far.
WIDTHS = (4, 8, 16)


def stock(shape: Shape) -> Way:
    """MLX's own kernel, as the modules call it."""

    def way(x: mx.array, modules: Sequence[Any]) -> list[mx.array]:
        return [
            mx.quantized_matmul(
                x, m["weight"], m["scales"], m["biases"], transpose=True, group_size=shape.group, bits=shape.bits
            )
            for m in modules
        ]

    return way


def padded(shape: Shape, width: int) -> Way:
    """MLX's own kernel on `width` rows, of which the first `shape.rows` count."""
    whole, missing = stock(shape), width - shape.rows

    def way(x: mx.array, modules: Sequence[Any]) -> list[mx.array]:
        wide = mx.pad(x.reshape(shape.rows, shape.k), [(0, missing), (0, 0)])
        return [y[: shape.rows].reshape(*x.shape[:-1], -1) for y in whole(wide, modules)]

    return way


def gemm(shape: Shape) -> Way:
    """Weights made floats once for all rows, and a plain product."""

    def way(x: mx.array, modules: Sequence[Any]) -> list[mx.array]:
        parts = [(m["weight"], m["scales"], m["biases"]) for m in modules]
        return [x @ mx.dequantize(*part, group_size=shape.group, bits=shape.bits).T for part in parts]

    return way


def why_not(shape: Shape, kind: str) -> str | None:
    """Why our kernel for `kind` ("cuda", "metal") is not written for this shape, None where it is."""
    return _module(kind).why_not(*shape)


def own(shape: Shape, kind: str) -> Way:
    """Our kernel for `kind`; all matrices in one launch."""
    home: Any = _module(kind)
    return launched(home, home.variant(*shape), shape)


def launched(home: Any, variant: Any, shape: Shape) -> Way:
    """The call of a kernel. All that does not depend on the arrays is made once, for a step makes hundreds of calls."""
    threads = 32 * (variant.warps if home is cuda else variant.simds)
    how: dict[str, Any] = {
        "output_dtypes": [shape.dtype] * len(shape.out),
        "grid": (home.blocks(variant, shape.out) * threads, 1, 1),
        "threadgroup": (threads, 1, 1),
    }
    kernel: Any = cuda.compiled(variant) if home is cuda else None
    if kernel is not None:
        how["scalars"] = [shape.rows, shape.k, *shape.out]
    else:
        kernel = home.kernel(variant)

    def way(x: mx.array, modules: Sequence[Any]) -> list[mx.array]:
        inputs = [x]
        for m in modules:
            inputs += (m["weight"], m["scales"], m["biases"])
        lead = x.shape[:-1]
        return kernel(inputs=inputs, output_shapes=[(*lead, n) for n in shape.out], **how)

    return way


def compile_own(shapes: Iterable[Any]) -> None:
    """Have our CUDA kernels for shapes of products, of recurrences and of attention compiled side by side, so that none waits
    for its own later; other shapes have none. Does nothing on other devices."""
    programs: list[Program] = []
    for shape in shapes:
        if isinstance(shape, Shape) and not cuda.why_not(*shape):
            programs.append(cuda.program(cuda.variant(*shape)))
        elif isinstance(shape, gated.Gated) and not gated.why_not(shape):
            programs += [gated.program(gated.variant(shape, given)) for given in ("", "mask", "counts")]
        elif isinstance(shape, own_attention.Attention) and not own_attention.why_not(shape):
            scale = own_attention.usual_scale(shape)
            programs.append(own_attention.program(own_attention.variant(shape, scale)))
    compile_all(programs)


def _module(kind: str) -> Any:
    return {"cuda": cuda, "metal": metal}[kind]
