"""The gated delta recurrence for NVIDIA GPUs: the kernel's text for a shape, and its calls.

All rows of a block are one launch, with float32 arithmetic whatever the inputs are, and a row's bits do not depend on how
many others came with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from dspark.kernels.precompiled import Kernel, Program, contiguous
from dspark.kernels.precompiled import kernel as precompiled
from dspark.kernels.text import defines, shortened

# Rows of the state that a warp holds, and warps of a block.
ROWS, WARPS = 4, 4
WIDEST = 256
KINDS = {mx.float32: 0, mx.float16: 1, mx.bfloat16: 2}
TEXT = "gated.cu"


class Gated(NamedTuple):
    """What a recurrence is chosen for, whatever the rows. `keys`, `values`: heads of k and of v; `dk`, `dv`: their columns;
    `vector`: a gate for each column of k; number formats of q, k and v, of the gates and of beta."""

    keys: int
    values: int
    dk: int
    dv: int
    vector: bool
    x: mx.Dtype
    gate: mx.Dtype
    beta: mx.Dtype

    def __str__(self) -> str:
        kinds = "/".join(str(kind).removeprefix("mlx.core.") for kind in (self.x, self.gate, self.beta))
        gates = "vector" if self.vector else "scalar"
        return f"gated delta, {self.keys} and {self.values} heads, {self.dk} -> {self.dv}, {gates} gates, {kinds}"


class Variant(NamedTuple):
    """What a kernel is compiled for. `given`: "" for all rows, "mask", or "counts" for the state alone."""

    dk: int
    dv: int
    vector: bool
    x: int
    gate: int
    beta: int
    given: str = ""


def kind_of(q: mx.array, v: mx.array, g: mx.array, beta: mx.array) -> Gated:
    """The shape of a call: q [B, T, Hk, Dk], v [B, T, Hv, Dv], g [B, T, Hv] or [B, T, Hv, Dk], beta [B, T, Hv]."""
    return Gated(q.shape[2], v.shape[2], q.shape[3], v.shape[3], g.ndim == 4, q.dtype, g.dtype, beta.dtype)


def why_not(kind: Gated) -> str | None:
    """Why the kernel is not written for a shape, None where it is."""
    for size in (kind.dk, kind.dv):
        if size % 32 or not 0 < size <= WIDEST:
            return f"{size} columns a head, where multiples of 32 up to {WIDEST} are written"
    if kind.values % kind.keys:
        return f"{kind.values} heads of v are no multiple of {kind.keys}"
    odd = [kind for kind in (kind.x, kind.gate, kind.beta) if kind not in KINDS]
    return f"{str(odd[0]).removeprefix('mlx.core.')} input, where floats of 16 and 32 bits are written" if odd else None


def fits(kind: Gated, k: mx.array, v: mx.array, state: mx.array, mask: mx.array | None) -> bool:
    """Whether the other arguments of a call are what the kernel reads."""
    rows = k.shape[:2]
    return (
        k.dtype == kind.x
        and v.dtype == kind.x
        and k.shape[2:] == (kind.keys, kind.dk)
        and state.dtype == mx.float32
        and state.shape == (rows[0], kind.values, kind.dv, kind.dk)
        and (mask is None or (mask.dtype == mx.bool_ and mask.shape == rows))
    )


@lru_cache(None)
def variant(kind: Gated, given: str = "") -> Variant:
    return Variant(kind.dk, kind.dv, kind.vector, KINDS[kind.x], KINDS[kind.gate], KINDS[kind.beta], given)


def update(
    kind: Gated,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Outputs [B, T, Hv, Dv] in q's format, zeros where a mask [B, T] is false, and the state [B, Hv, Dv, Dk] behind all."""
    inputs, given = [q, k, v, g, beta, state], ""
    if mask is not None:
        inputs, given = [*inputs, mask], "mask"
    y, out = launch(variant(kind, given), inputs, [v.shape, state.shape], [q.dtype, mx.float32])
    return y, out


def state_behind(
    kind: Gated,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None,
    keep: Sequence[int],
) -> mx.array:
    """The state behind the first `keep` rows of each batch row, bit for bit what `update` had there. One launch."""
    rows = counts(tuple(keep))
    if mask is not None:
        mask = mask & (mx.arange(k.shape[1])[None] < rows[:, None])
        return update(kind, k, k, v, g, beta, state, mask)[1]
    return launch(variant(kind, "counts"), [k, v, g, beta, state, rows], [state.shape], [mx.float32])[0]


@lru_cache(256)
def counts(keep: tuple[int, ...]) -> mx.array:
    """Shared by all layers, and by all rounds that keep as many."""
    return mx.array(list(keep), dtype=mx.int32)


def launch(kind: Variant, inputs: list[mx.array], shapes: list[Any], dtypes: list[mx.Dtype]) -> list[mx.array]:
    """Build a call of the kernel. `shapes`: of the outputs, the state's last."""
    threads = 32 * WARPS
    call = {
        "inputs": inputs,
        "output_shapes": shapes,
        "output_dtypes": dtypes,
        "grid": (blocks(kind, shapes[-1]) * threads, 1, 1),
        "threadgroup": (threads, 1, 1),
    }
    if (own := compiled(kind)) is None:
        return kernel(kind)(**call)
    # q and k have rows and heads in the same places.
    return own(**call, scalars=[*inputs[0].shape[1:3], shapes[-1][1]])


def blocks(kind: Variant, state: Sequence[int]) -> int:
    return state[0] * state[1] * (kind.dv // (ROWS * WARPS))


@lru_cache(None)
def compiled(kind: Variant) -> Kernel | None:
    """The kernel without MLX's compilation, None where this machine has none. Its scalars: rows, heads of k and of v.

    MLX hands such a kernel no strides, so views are copied: one small copy for the v of a block that is a slice, where a start
    waits seconds less for each variant.
    """
    return precompiled(program(kind))


def program(kind: Variant) -> Program:
    per_head = ["rows", "values", *([str(kind.dk)] if kind.vector else [])]
    keyed = ["rows", "keys", str(kind.dk)]
    axes = {
        "q": keyed,
        "k": keyed,
        "v": ["rows", "values", str(kind.dv)],
        "g": per_head,
        "b": per_head[:2],
        "h": ["values", str(kind.dv), str(kind.dk)],
        "m": ["rows"],
    }
    there = input_names(kind)
    # Without heads there is nothing to divide by.
    first = ["if (values < 1) return;", "const int k_shape[] = {0, rows, keys}, v_shape[] = {0, rows, values};"]
    # The first axis is the batch: no step depends on its length.
    first += [contiguous(name, ["", *axes[name]]) for name in there if name in axes]
    return Program(
        "dspark_gated",
        *texts(kind),
        tuple(f"const {'int' if name == 'n' else 'void'}* {name}" for name in there),
        tuple(f"{'float' if name == 'z' else 'void'}* {name}" for name in output_names(kind)),
        ("rows", "keys", "values"),
        "\n".join(first),
    )


@lru_cache(None)
def kernel(kind: Variant) -> Any:
    """The kernel as MLX compiles it, once a process."""
    header, source = texts(kind)
    names = input_names(kind)
    # MLX keeps compiled kernels on disk by name alone, so the name must change with the text.
    digest = hashlib.sha256((header + source).encode()).hexdigest()[:12]
    return mx.fast.cuda_kernel(
        name=f"dspark_gated_{digest}",
        input_names=names,
        output_names=output_names(kind),
        header=header,
        source=source,
        # Views are read by their strides.
        ensure_row_contiguous=False,
    )


def input_names(kind: Variant) -> list[str]:
    """Letters of which none ends a longer one: MLX finds by their names what the body asks of an array's shape."""
    if kind.given == "counts":
        return ["k", "v", "g", "b", "h", "n"]
    return ["q", "k", "v", "g", "b", "h", *(["m"] if kind.given else [])]


def output_names(kind: Variant) -> list[str]:
    return ["z"] if kind.given == "counts" else ["y", "z"]


def texts(kind: Variant) -> tuple[str, str]:
    """(header, body) of a kernel. Short, for MLX copies them at each call."""
    constants = {
        "DK": kind.dk,
        "DV": kind.dv,
        "ROWS": ROWS,
        "WARPS": WARPS,
        "X": kind.x,
        "GATE": kind.gate,
        "BETA": kind.beta,
        "VECTOR": int(kind.vector),
        "MASKED": int(kind.given == "mask"),
        "COUNTED": int(kind.given == "counts"),
    }
    return defines(constants) + shortened(TEXT), body(kind)


def body(kind: Variant) -> str:
    axes = {"q": 4, "k": 4, "v": 4, "g": 4 if kind.vector else 3, "b": 3, "h": 4, "m": 2}
    there = input_names(kind)
    views = [_view(name, axes[name]) if name in there else "{0, 0, 0, 0, 0}" for name in axes]
    rest = ["n" if "n" in there else "0", "(void*)y" if kind.given != "counts" else "0", "z"]
    sizes = ["k_shape[1]", "k_shape[2]", "v_shape[2]"]
    return f"dspark_gated::Job job = {{{', '.join([*views, *rest, *sizes])}}};\ndspark_gated::run(job);"


def _view(name: str, axes: int) -> str:
    strides = [f"{name}_strides[{i}]" for i in range(axes)] + ["0"] * (4 - axes)
    return "{(const void*)" + ", ".join([name, *strides]) + "}"
