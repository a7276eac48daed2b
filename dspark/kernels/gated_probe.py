"""Whether the gated delta kernel is right and faster on this machine: measured once for a shape, on numbers as models have."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx

from dspark.kernels import gated
from dspark.kernels.gated import Gated
from dspark.kernels.measure import Finding

# Rows of a plain step and of a verify.
LENGTHS = (1, 8)
CALLS, REPEATS = 12, 3
# It must be so much faster than the loop it stands for, in rows of a verify, and no slower in a plain step.
MARGIN = 0.95
# Of a value and of the root mean square of all: sums of up to 256 products in float32 in another order, over 8 rows.
STATE = 1e-4
# The outputs are rounded to the inputs' format besides: half a unit in the last place.
ROUNDING = {mx.float32: 0.0, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}


class Drawn(NamedTuple):
    """The arguments of a call."""

    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array
    state: mx.array


def measure(kind: Gated) -> Finding:
    """Try the kernel on one shape. Costs some dozen small calls, and the compilation of its three variants."""
    if why := gated.why_not(kind):
        return Finding("stock", why=why)
    try:
        worst = max(error(kind, batch, length) for batch, length in ((1, 1), (1, 8), (2, 5)))
    except Exception as broken:  # a kernel that does not compile or start here is a finding
        text = str(broken).strip() or "no reason given"
        return Finding("stock", why=f"{type(broken).__name__}: {text.splitlines()[-1][:200]}")
    if not worst <= 1:
        return Finding("stock", worst=worst, why=f"wrong on this machine: {worst:.3g} times the tolerance off")
    took = {length: timed(kind, length) for length in LENGTHS}
    (step, stock_step), (us, stock_us) = took[1], took[8]
    if us > MARGIN * stock_us or step > stock_step:
        return Finding("stock", 0, stock_us, stock_us, worst, f"{us:.0f} us for 8 rows, {step:.0f} us for one")
    return Finding("cuda", 0, us, stock_us, worst)


def drawn(kind: Gated, batch: int, length: int, seed: int = 0) -> Drawn:
    """Arguments as models make them: keys of length 1, gates just below 1."""
    keys = mx.random.split(mx.random.key(seed), 6)

    def normal(i: int, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=keys[i])

    k = normal(1, batch, length, kind.keys, kind.dk)
    gates = (batch, length, kind.values, *([kind.dk] if kind.vector else []))
    return Drawn(
        (normal(0, batch, length, kind.keys, kind.dk) * kind.dk**-0.5).astype(kind.x),
        (k / mx.linalg.norm(k, axis=-1, keepdims=True)).astype(kind.x),
        normal(2, batch, length, kind.values, kind.dv).astype(kind.x),
        mx.random.uniform(0.5, 1.0, gates, key=keys[3]).astype(kind.gate),
        mx.random.uniform(0.1, 0.9, (batch, length, kind.values), key=keys[4]).astype(kind.beta),
        normal(5, batch, kind.values, kind.dv, kind.dk),
    )


def error(kind: Gated, batch: int, length: int) -> float:
    """The largest difference from float32 arithmetic on the CPU, in tolerances, with a mask and without one; infinite where
    something is no number, or where a state rebuilt at a row is not bit for bit the one that was there."""
    given = drawn(kind, batch, length)
    keep = [max(1, length - 2 - i) for i in range(batch)]
    mask = mx.arange(length)[None] < mx.array(keep)[:, None]
    worst = 0.0
    for seen in (None, mask):
        y, state = gated.update(kind, *given, mask=seen)
        with mx.stream(mx.cpu):
            exact_y, exact_state = in_float32(*[a.astype(mx.float32) for a in given], mask=seen)
            if seen is not None:
                y, exact_y = (mx.where(seen[..., None, None], a, 0) for a in (y, exact_y))
            worst = max(worst, _far(y, exact_y, STATE + ROUNDING[kind.x]), _far(state, exact_state, STATE))
    rebuilt = gated.state_behind(kind, *given[1:], None, keep)
    return worst if mx.array_equal(rebuilt, state).item() else float("inf")


def in_float32(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, mask: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """The rule row by row, in plain operations."""
    group = v.shape[2] // k.shape[2]
    q, k = mx.repeat(q, group, axis=2), mx.repeat(k, group, axis=2)
    outputs = []
    for t in range(q.shape[1]):
        decay = g[:, t, :, None, :] if g.ndim == 4 else g[:, t, :, None, None]
        new = state * decay
        delta = (v[:, t] - (new * k[:, t, :, None]).sum(-1)) * beta[:, t, :, None]
        new = new + delta[..., None] * k[:, t, :, None]
        outputs.append((new * q[:, t, :, None]).sum(-1))
        state = new if mask is None else mx.where(mask[:, t, None, None, None], new, state)
    return mx.stack(outputs, axis=1), state


def timed(kind: Gated, length: int) -> tuple[float, float]:
    """Microseconds a call, the host's part included: the kernel's, and those of the loop in mlx-lm. Calls follow one another,
    as the steps of a context do."""
    from mlx_lm.models.gated_delta import gated_delta_ops

    given = drawn(kind, 1, length)
    mx.eval(given)

    def once(call: Callable[..., Any]) -> float:
        state, outputs, began = given.state, [], time.perf_counter()
        for _ in range(CALLS):
            y, state = call(*given[:-1], state)
            outputs.append(y)
        mx.eval(outputs, state)
        return (time.perf_counter() - began) / CALLS * 1e6

    ways = (lambda *args: gated.update(kind, *args), gated_delta_ops)
    took = [[once(way) for way in ways] for _ in range(REPEATS + 1)]
    # The first ones compile.
    return median(own for own, _ in took[1:]), median(loop for _, loop in took[1:])


def _far(made: mx.array, exact: mx.array, tolerance: float) -> float:
    room = tolerance * (mx.abs(exact) + mx.sqrt(mx.mean(mx.square(exact))))
    far = mx.abs(made.astype(mx.float32) - exact) / room
    largest: Any = mx.max(far).item()
    return float("inf") if mx.isnan(far).any().item() else largest
