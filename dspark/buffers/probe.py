"""The proof of a rollback plan on the loaded model: a few small forwards, before the first token is decoded.

Blocks are verified and settled at every keep; the logits of all that stands are compared with those of a model that was
fed the same tokens and never rolled back. How far two such computations may differ is not guessed: it is measured, by
feeding the same tokens in one piece as well.
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx

from dspark.buffers.leaves import is_rotating, leaves
from dspark.buffers.plan import Plan
from dspark.buffers.rollers import AbstractRoller
from dspark.buffers.single import SingleBuffers
from dspark.errors import BindError, DsparkError

WIDTH = 4
# (rows fed, rows kept); None keeps nothing by undoing the forward. Every keep, wide blocks and single rows in all orders.
STEPS: tuple[tuple[int, int | None], ...] = (
    (WIDTH, 2),
    (1, 1),
    (WIDTH, 1),
    (WIDTH, None),
    (WIDTH, 3),
    (1, None),
    (1, 1),
    (WIDTH, WIDTH),
    (WIDTH, 1),
    (1, 1),
)
NEAR_WINDOW = 64
# A legitimate difference may be this many times the one measured; where that is 0, this many units in the last place.
MARGIN, ULPS = 4.0, 8.0


@attrs.frozen
class Proof:
    """What the probe found. Logit units: `worst` difference behind rollbacks, `noise` between two legitimate computations,
    `tolerance` allowed, `signal` of one token less of context. `past_window`: rotating caches were wrapped meanwhile."""

    plan: Plan
    worst: float
    noise: float
    tolerance: float
    signal: float
    past_window: bool = False
    remembered: bool = False
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """`proved: 1.2e-05 off at most, 4.0e-05 allowed, a token less shows as 3.1`, for `explain`."""
        if self.remembered:
            return "proved before on this model and these versions"
        return f"proved: {self.worst:.1e} off at most, {self.tolerance:.1e} allowed, a token less shows as {self.signal:.1e}"


def prove(
    target: Any,
    plan: Plan,
    make_buffers: Callable[[Plan], SingleBuffers] | None = None,
    remember: Path | None = None,
) -> Proof:
    """Verify, settle at every keep, and compare with a forward that was never rolled back.

    `remember`: a JSON file with the plans proved before, by model and versions. Under "auto" a refuted plan falls to the next
    method for the layers whose state is off, and the notes say so; any other is a BindError. So is a model whose own forward
    disagrees with itself. Costs about 20 forwards of a few rows.
    """
    if not hasattr(target, "fingerprint"):
        # Nothing tells this target from another one, so nothing is known of it.
        remember = None
    key = _key(target, plan) if remember is not None else ""
    if remember is not None and key in _recall(remember):
        return Proof(plan, 0.0, 0.0, 0.0, 0.0, remembered=True)
    _prove_windows(target, plan)
    _prove_reach(target)
    build = make_buffers or (lambda p: SingleBuffers(target.make_caches(), p))
    notes: list[str] = []
    for _ in range(3):
        proof = _attempt(target, plan, build)
        if proof.worst <= proof.tolerance:
            if remember is not None and not notes:
                _write(remember, key)
            return attrs.evolve(proof, notes=(*proof.notes, *notes))
        if plan.method != "auto":
            raise BindError(
                f"the rollback {plan.summary()} is refuted on this model: {_shown(proof)}; use method 'auto'"
            )
        wrong = _suspects(target, plan, build)
        if all(layer.roller.refeeds for layer in plan.layers if layer.index in wrong):
            break
        notes.append(f"layers {', '.join(wrong)}: {plan.summary()} was refuted ({_shown(proof)})")
        plan = plan.demoted(wrong)
    raise BindError(f"no rollback could be proved on this model: {_shown(proof)}; decode it with mlx_lm instead")


def _shown(proof: Proof) -> str:
    return f"behind a rollback its logits are {proof.worst:.1e} off, where {proof.tolerance:.1e} is allowed"


# ---- one attempt --------------------------------------------------------------------------------------------------------


@attrs.frozen
class _Tokens:
    """A prompt and blocks of tokens, and what of them is kept."""

    prompt: list[int]
    blocks: list[list[int]]

    @property
    def kept(self) -> list[int]:
        return [t for block, (_, keep) in zip(self.blocks, STEPS, strict=True) for t in block[: keep or 0]]


def _attempt(target: Any, plan: Plan, build: Callable[[Plan], SingleBuffers]) -> Proof:
    window = min((c.max_size for _, c in leaves(target.make_caches()) if is_rotating(c)), default=0)
    near = 0 < window <= NEAR_WINDOW
    tokens = _draw(target.vocab_size, max(window - 6, 3) if near else 6)
    try:
        rolled = _rolled(target, build(plan), tokens)
    except DsparkError:
        raise
    except Exception as error:
        raise BindError(f"verifying a few tokens fails on this model: {type(error).__name__}: {error}") from error
    stepwise, whole = _committed(target, build(plan), tokens), _whole(target, build(plan), tokens)
    mx.eval(rolled, stepwise, whole)
    noise = apart(stepwise, whole)
    signal = apart(_whole(target, build(plan), tokens, skip=1)[:, -1:], whole[:, -1:])
    peak = _largest(stepwise)
    tolerance = allowed(noise, stepwise)
    _check_self(noise, signal, peak)
    notes = () if tolerance < signal else ("the probe cannot tell a missing token from rounding on this model",)
    return Proof(plan, apart(rolled, stepwise), noise, tolerance, signal, near, notes=notes)


def _check_self(noise: float, signal: float, peak: float) -> None:
    # Not `noise > ...`: a model that gives NaN fails too.
    if not noise <= max(0.5 * signal, 0.02 * peak):
        raise BindError(
            f"this model's own forward gives other logits for tokens fed in blocks than for the same tokens fed at once "
            f"({noise:.1e} apart, where a missing token shows as {signal:.1e}), so drafts cannot be verified"
        )


def _draw(vocab_size: int, prompt: int) -> _Tokens:
    chance = random.Random(20)
    take = lambda n: [chance.randrange(vocab_size) for _ in range(n)]
    return _Tokens(take(prompt), [take(width) for width, _ in STEPS])


def _rolled(target: Any, buffers: SingleBuffers, tokens: _Tokens) -> mx.array:
    """Logits of all that was kept, [1, kept, V], as speculation computes them."""
    _feed(target, buffers, tokens.prompt)
    said = []
    for block, (_, keep) in zip(tokens.blocks, STEPS, strict=True):
        logits, _ = buffers.forward(target, mx.array([block]))
        mx.eval(logits)
        if keep is None:
            buffers.restore()
        else:
            buffers.settle((keep,), (tuple(block),))
            said.append(logits[:, :keep])
        mx.eval(buffers.state)
    return mx.concatenate(said, axis=1)


def _committed(target: Any, buffers: SingleBuffers, tokens: _Tokens) -> mx.array:
    """The same, with nothing fed but what is kept."""
    _feed(target, buffers, tokens.prompt)
    kept = [block[:keep] for block, (_, keep) in zip(tokens.blocks, STEPS, strict=True) if keep]
    return mx.concatenate([_feed(target, buffers, block) for block in kept], axis=1)


def _whole(target: Any, buffers: SingleBuffers, tokens: _Tokens, skip: int = 0) -> mx.array:
    """The same, from one forward; `skip`: leave out so many tokens in front of the last one."""
    kept = tokens.kept
    ids = [*tokens.prompt, *kept[: len(kept) - 1 - skip], kept[-1]]
    return _feed(target, buffers, ids)[:, len(tokens.prompt) :]


def _feed(target: Any, buffers: SingleBuffers, ids: Sequence[int]) -> mx.array:
    logits, _ = buffers.forward(target, mx.array([list(ids)]))
    buffers.settle((len(ids),), (tuple(ids),))
    mx.eval(logits, buffers.state)
    return logits


def allowed(noise: float, logits: mx.array) -> float:
    """How far apart two computations of these logits may be, when two legitimate ones are `noise` apart."""
    peak = _largest(logits)
    return max(MARGIN * noise, ULPS * mx.finfo(logits.dtype).eps * peak)


def apart(a: mx.array, b: mx.array) -> float:
    """The largest difference of two arrays."""
    return _largest(a.astype(mx.float32) - b.astype(mx.float32))


def _largest(array: mx.array) -> float:
    value: Any = mx.abs(array.astype(mx.float32)).max().item()
    return float(value)


# ---- who is wrong -------------------------------------------------------------------------------------------------------


def _suspects(target: Any, plan: Plan, build: Callable[[Plan], SingleBuffers]) -> list[str]:
    """Indices of replayed layers whose state is off behind one rollback; all layers that are no checkpoint, if none is."""
    tokens = _draw(target.vocab_size, 6)
    rolled, fresh = build(plan), build(plan)
    for buffers, width in ((rolled, WIDTH), (fresh, 2)):
        _feed(target, buffers, tokens.prompt)
        block = tokens.blocks[0][:width]
        buffers.forward(target, mx.array([block]))
        buffers.settle((2,), (tuple(block),))
        mx.eval(buffers.state)
    pairs = zip(plan.layers, rolled.leaves, fresh.leaves, strict=True)
    replayed = [layer.index for layer, a, b in pairs if layer.roller.records and _differ(a.cache, b.cache)]
    return replayed or [layer.index for layer in plan.layers if not layer.roller.refeeds]


def _differ(a: Sequence[Any], b: Sequence[Any]) -> bool:
    for x, y in zip(a, b, strict=True):
        if x is None or y is None or x.shape != y.shape:
            return x is not y
        # Rounding moves a state by far less than this, and a missing token by far more.
        scale = _largest(y)
        if apart(x, y) > scale * max(1e-3, 8 * mx.finfo(y.dtype).eps if mx.issubdtype(y.dtype, mx.floating) else 0):
            return True
    return False


# ---- windows too wide to fill -------------------------------------------------------------------------------------------


def _prove_windows(target: Any, plan: Plan) -> None:
    """Roll a small cache of each rotating class back past its window, without the model: what a row may look at is read
    off keys that hold their own positions."""
    seen: set[type] = set()
    for layer, (index, cache) in zip(plan.layers, leaves(target.make_caches()), strict=True):
        if is_rotating(cache) and type(cache) not in seen and not layer.roller.refeeds:
            seen.add(type(cache))
            if (wrong := window_fault(type(cache)(max_size=8), layer.roller)) is not None:
                raise BindError(f"layer {index} ({layer.cache}) is rolled back wrongly past its window: {wrong}")


def _prove_reach(target: Any) -> None:
    """Refuse a model whose masks reach further back than its window caches: blocks would see what single rows do not."""
    caches = target.make_caches()
    for index, cache in leaves(caches):
        if is_rotating(cache):
            cache.make_mask = _spied(cache, index)
    target(mx.array([[0, 1, 0]]), caches)


def _spied(cache: Any, index: str) -> Callable[..., Any]:
    ask = cache.make_mask

    def make_mask(*args: Any, **kwargs: Any) -> Any:
        reach = inspect.signature(ask).bind(*args, **kwargs).arguments.get("window_size")
        if reach is not None and reach > cache.max_size:
            raise BindError(
                f"layer {index} keeps a window of {cache.max_size} tokens but lets a block look back {reach}, so past the "
                "window this model says other things in blocks than token by token, and drafts cannot be verified"
            )
        return ask(*args, **kwargs)

    return make_mask


def window_fault(cache: Any, roller: AbstractRoller) -> str | None:
    """What a rotating cache gets wrong under STEPS, or None. The cache must be empty and small."""
    held = 0
    for width, keep in ((3, 3), *STEPS, *STEPS):
        mask = cache.make_mask(width)
        ticket = roller.arm(cache, width)
        positions = mx.arange(held, held + width).astype(mx.float32).reshape(1, 1, width, 1)
        keys, _ = cache.update_and_fetch(positions, positions)
        for row, seen in enumerate(_visible(keys, mask, width)):
            last = held + row
            if seen != list(range(max(0, last - cache.max_size + 1), last + 1)):
                return f"the token at position {last} looks at {seen}"
        if keep is None:
            roller.rewind(cache, ticket)
        elif keep < width:
            roller.settle(cache, ticket, width, keep, None)
        held += keep or 0
    return None


def _visible(keys: mx.array, mask: Any, width: int) -> list[list[int]]:
    places: Any = keys[0, 0, :, 0].tolist()
    at = [int(p) for p in places]
    if mask is None or isinstance(mask, str):
        # No mask: every key; "causal": row i of the block looks at all but the rows behind it.
        return [
            sorted(at[: len(at) - width + 1 + row]) if isinstance(mask, str) else sorted(at) for row in range(width)
        ]
    allowed: Any = mx.broadcast_to(mask, (width, len(at))).tolist()
    return [sorted(p for p, ok in zip(at, row, strict=True) if ok) for row in allowed]


# ---- remembering --------------------------------------------------------------------------------------------------------


def _key(target: Any, plan: Plan) -> str:
    from importlib.metadata import version

    versions = " ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "mlx-vlm"))
    return f"{target.fingerprint} | {plan.method}: {plan.summary()} | {versions} | {mx.default_device()}"


def _recall(path: Path) -> list[str]:
    try:
        return list(json.loads(path.read_text(encoding="utf-8"))["proved"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _write(path: Path, key: str) -> None:
    """Add a key. A cache that cannot be written costs the next bind a probe and nothing else."""
    known = [k for k in _recall(path) if k != key][-199:]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".new")
        scratch.write_text(json.dumps({"proved": [*known, key]}, indent=0), encoding="utf-8")
        scratch.replace(path)
    except OSError:
        return
