"""Whole forwards in one launch: turned on for a target where this machine found them right and faster, and a drafter's rounds
beside them where it found those right."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx

from dspark.kernels import driver, stack, stack_draft, store
from dspark.kernels.measure import MARGIN, Finding
from dspark.kernels.precompiled import compile_all
from dspark.kernels.tiles import unpacked
from dspark.models.heads import Head, draft
from dspark.platform import memory_available

# Tokens of the forward that is compared, the rows of it that the kernel does, and rows that MLX is given at once: for more it
# compiles kernels, half a minute each.
TOKENS, COMPARED, PIECE = 42, 14, 7
# The largest difference between two ways of computing logits in 16 bits, in root mean squares: they round after every operation,
# the kernel seldom. Measured are 0.012 to 0.019 for float16, of which bfloat16 has an eighth of the precision; a key too few, a
# wrong position or scale is off by 0.5 and more.
LOGITS = {mx.float16: 2.0**-4, mx.bfloat16: 2.0**-2}
# Of this many drafts behind different tokens so many must be float32's: the rest may be near ties.
DRAFTS, AGREED = 16, 12
CALLS, REPEATS = 8, 5


class Launches:
    """What is on for one target and its drafters. `close` takes it off; safe to call twice. findings: by what they are of."""

    def __init__(self, target: Any):
        self.target, self.findings = target, {}
        self._holders: list[Any] = []

    @property
    def on(self) -> bool:
        """Whether the target's forwards are launches."""
        return bool(self._holders)

    def close(self) -> None:
        for holder in self._holders:
            holder.launch = None
        self._holders.clear()

    def put(self, holder: Any, launch: Any) -> None:
        holder.launch = launch
        self._holders.append(holder)

    def enable_head(self, head: Any, *, probe: bool = True, file: Path | None = None) -> None:
        """A drafter's round, if it is written for this one and found right: beside launched forwards it is not timed."""
        if not self.on or not isinstance(head, Head):
            return
        dtype = self.target.launch.stack.dtype
        kind = stack_draft.study(head, dtype)
        if isinstance(kind, str):
            self.findings[f"{head.config.kind} round"] = Finding("stock", why=kind)
            return
        tapped = head.config.target_layer_ids
        forward: stack.Forward = self.target.launch
        blocks = forward.stack.blocks
        compile_all(
            [
                *(stack.program(forward.stack._replace(tapped=tapped, cols=cols)) for cols in (1, 2)),
                stack_draft.program(kind._replace(layers=kind.layers._replace(blocks=blocks))),
            ]
        )
        # Made where it is measured or used: what was found before may be that it does not pay.
        made = lru_cache(1)(lambda: stack_draft.DraftRound(head, kind, blocks, self.target))
        found = _found(str(kind), lambda: _measure_round(self.target, head, made()), probe, file)
        if found is not None:
            self.findings[str(kind)] = found
            if found.way == "cuda":
                self.put(head, made())

    def lines(self) -> list[str]:
        """What is on, for `explain`."""
        said = []
        for name, found in self.findings.items():
            detail = f"{found.us:,.0f} us for {found.stock_us:,.0f}" if found.way != "stock" and found.us else found.why
            way = "one launch" if found.way == "cuda" else "MLX's own"
            said.append(f"{name}: {way}" + (f" ({detail})" if detail else ""))
        return said


def enable(
    target: Any, *, probe: bool = True, file: Path | None = None, say: Callable[[str], None] = lambda text: None
) -> Launches | None:
    """Have a target's forwards of few rows done in one launch, if they are written for it, there is room for a copy of its weights,
    and this machine finds them right and faster; None on other devices than CUDA's."""
    blocks = driver.multiprocessors()
    if blocks is None or mx.metal.is_available() or mx.default_device().type != mx.DeviceType.gpu:
        return None
    launches, kind = Launches(target), stack.study(target.core)
    if isinstance(kind, str):
        launches.findings["forward"] = Finding("stock", why=kind)
        return launches
    kind = kind._replace(memory=driver.shared_memory() or kind.memory)
    if 3 * kind.nbytes > memory_available():
        launches.findings[str(kind)] = Finding("stock", why="no room for a copy of the weights")
        return launches
    made = lru_cache(1)(lambda: stack.Forward(target.core, kind, blocks))

    def measured() -> Finding:
        say(f"measuring a {kind}")
        return _measure_forward(target, made())

    found = _found(str(kind), measured, probe, file)
    if found is not None:
        launches.findings[str(kind)] = found
        if found.way == "cuda":
            launches.put(target, made())
    return launches


def _found(name: str, made: Callable[[], Finding], probe: bool, file: Path | None) -> Finding | None:
    """What is known of this here, and with `probe` what is measured now."""
    known = store.read(file).get(name)
    if known is not None or not probe:
        return known
    try:
        found = made()
    except Exception as broken:  # a kernel that does not compile or start here is a finding
        text = str(broken).strip() or "no reason given"
        return Finding("stock", why=f"{type(broken).__name__}: {text.splitlines()[-1][:200]}")
    with contextlib.suppress(OSError):
        store.write({name: found}, file)
    return found


def _measure_forward(target: Any, forward: stack.Forward) -> Finding:
    """Compare a forward's last rows with MLX's own and a step's time with its."""
    compile_all(stack.program(forward.stack._replace(cols=cols)) for cols in (1, 2))
    if forward.kernel(1, ())[1] is None or forward.kernel(COMPARED, ())[1] is None:
        return Finding("stock", why="this machine compiles no kernels of ours")
    vocab, held = forward.stack.vocab, TOKENS - COMPARED
    ids = mx.random.randint(0, vocab, (1, TOKENS), key=mx.random.key(1))
    want = _in_pieces(target, ids, target.make_caches())[:, held:].astype(mx.float32)
    caches = target.make_caches()
    mx.eval(want, _in_pieces(target, ids[:, :held], caches))
    worst = 0.0
    for rows in (COMPARED, PIECE, 1):
        got = forward(ids[:, held : held + rows], caches, ())[0].astype(mx.float32)
        for cache in caches:
            cache.offset = held
        far = mx.abs(got - want[:, :rows]).max() / mx.sqrt(mx.square(want[:, :rows]).mean())
        room = LOGITS[forward.stack.dtype]
        off: Any = (far / room).item()
        worst = max(worst, off if off == off else float("inf"))
    if not worst <= 1:
        return Finding("stock", worst=worst, why=f"wrong on this machine: {worst:.3g} times the tolerance off")
    first = ids[:, held : held + 1]
    us, stock_us = _timed(caches, first, lambda x: forward(x, caches, ()), lambda x: target(x, caches))
    forward.leave(caches)
    if us > MARGIN * stock_us:
        return Finding("stock", 0, stock_us, stock_us, worst, f"{us:,.0f} us a step")
    return Finding("cuda", 0, us, stock_us, worst)


def _in_pieces(target: Any, ids: mx.array, caches: Any) -> mx.array:
    """Logits [1, W, V] by MLX's own kernels for few rows."""
    pieces = [target(ids[:, i : i + PIECE], caches)[0] for i in range(0, ids.shape[1], PIECE)]
    return mx.concatenate(pieces, axis=1)


def _timed(caches: Any, first: mx.array, *ways: Callable[[mx.array], Any]) -> list[float]:
    """Microseconds a step of each way, in turn; medians. Steps follow one another as plain decoding's do, each sent before the one
    in front of it is done."""
    held = caches[0].offset

    def once(way: Callable[[mx.array], Any]) -> float:
        began, token = time.perf_counter(), first
        for _ in range(CALLS):
            token = mx.argmax(way(token)[0], axis=-1)
            mx.async_eval(token)
        mx.eval(token)
        for cache in caches:
            cache.offset = held
        return (time.perf_counter() - began) / CALLS * 1e6

    took = [[once(way) for way in ways] for _ in range(REPEATS + 1)]
    # The first ones compile.
    return [median(spent) for spent in zip(*took[1:], strict=True)]


def _measure_round(target: Any, head: Head, made: stack_draft.DraftRound) -> Finding:
    """Compare drafts behind a text's own taps with those of float32 arithmetic on the CPU."""
    if made.kernel is None:
        return Finding("stock", why="this machine compiles no kernels of ours")
    tokens, rows = 32, 8
    ids = mx.random.randint(0, made.kind.layers.vocab, (1, tokens + rows), key=mx.random.key(2))
    taps = target(ids, target.make_caches(), head.config.target_layer_ids)[1]
    taps = taps.astype(mx.float16 if made.kind.taps_half else mx.bfloat16)
    context = head.absorb(head.make_context(), taps[:, :tokens])
    anchors = [mx.random.randint(0, made.kind.layers.vocab, (1, 1), key=mx.random.key(i)) for i in range(DRAFTS)]
    slots = head.config.slots_for(1)
    mx.eval(taps, context.state, anchors)
    drafted = []
    for anchor in anchors:
        drafted.append(made(context, taps[:, tokens:], rows, anchor, 1, slots))
        mx.eval(drafted[-1])
    with mx.stream(mx.cpu):
        exact = _in_float32(head, target)
        whole = exact.absorb(exact.make_context(), taps.astype(mx.float32))
        wanted = [draft(exact, exact.block(whole, anchor, slots), anchor, 1).tokens for anchor in anchors]
        mx.eval(wanted)
    agreed = sum(a[0, 1].item() == b.item() for a, b in zip(drafted, wanted, strict=True))
    if agreed < AGREED:
        return Finding("stock", why=f"wrong on this machine: {agreed} of {DRAFTS} drafts are float32's")
    return Finding("cuda")


def _in_float32(head: Head, target: Any) -> Head:
    """A drafter's twin."""
    exact, own = Head(head.config), dict(head.named_modules())
    for name, module in exact.named_modules():
        if "weight" in module:
            module.weight = unpacked(own[name], mx.float32)
    if head.target_ids is not None:
        exact.reduce_vocabulary(head.target_ids)
    table = stack_draft.head_table(head, target, mx.float32)
    exact.bind(lambda ids: head.embed(ids).astype(mx.float32), lambda x: x @ table.T, head.target_vocab_size)
    return exact
