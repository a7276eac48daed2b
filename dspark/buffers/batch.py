"""Choosing the layout of several rows: one forward for all where the model can, else one row after another, and saying why."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from dspark.buffers.plan import Plan
from dspark.buffers.probe import allowed, apart
from dspark.buffers.quantize import KVBits
from dspark.buffers.ragged import RaggedBuffers, unbatchable
from dspark.buffers.single import SingleBuffers
from dspark.buffers.stacked import StackedBuffers
from dspark.errors import DsparkError

PROMPTS = (11, 4)
# For each block: rows fed, and how many of them each batch row keeps.
STEPS = ((4, (2, 4)), (1, (1, 1)), (4, (4, 1)))

_refused: weakref.WeakKeyDictionary[Any, dict[tuple[Plan, KVBits | None], str | None]] = weakref.WeakKeyDictionary()


def batch_of(target: Any, row: SingleBuffers) -> RaggedBuffers | StackedBuffers:
    """A layout that further rows can be admitted to, made of one prefilled row, which must not be used again.

    `RaggedBuffers` where the model is proved right on rows of different lengths (a few small forwards, once for a target
    and plan), else `StackedBuffers`, whose `reason` says why rows go one after another.
    """
    reason = unbatchable(row.caches, row.plan) or _late(row.kv) or _trial(target, row)
    if reason is None:
        return RaggedBuffers(row)
    row.pay(target)
    return StackedBuffers(row, reason)


def _late(kv: KVBits | None) -> str | None:
    if kv is not None and kv.start:
        return f"rows reach the {kv.start} tokens from which their caches are quantised at different times"
    return None


def _trial(target: Any, row: SingleBuffers) -> str | None:
    known = _refused.setdefault(target, {})
    key = (row.plan, row.kv)
    if key not in known:
        known[key] = ragged_fault(target, *key)
    return known[key]


def ragged_fault(target: Any, plan: Plan, kv: KVBits | None = None) -> str | None:
    """What goes wrong when this model decodes two rows of different lengths in one forward, or None.

    The same rows, alone and never rolled back, are what they are compared with.
    """
    new = lambda: SingleBuffers(target.make_caches(), plan, kv)
    chance = random.Random(21)
    take = lambda n: [chance.randrange(target.vocab_size) for _ in range(n)]
    prompts = [take(n) for n in PROMPTS]
    blocks = [[take(width) for _ in prompts] for width, _ in STEPS]
    alone = [_alone(target, new, prompt, blocks, i) for i, prompt in enumerate(prompts)]
    try:
        together = _together(target, new, prompts, blocks)
    except DsparkError as error:
        return str(error)
    except Exception as error:
        return f"its forward fails on rows of different lengths ({type(error).__name__}: {error})"
    for (stepwise, whole), rows in zip(alone, together, strict=True):
        worst, limit = apart(rows, stepwise), allowed(apart(stepwise, whole), stepwise)
        if not worst <= limit:
            return f"rows of different lengths come out {worst:.1e} off in one forward, where {limit:.1e} is allowed"
    return None


def _alone(
    target: Any, new: Callable[[], SingleBuffers], prompt: list[int], blocks: list[list[list[int]]], row: int
) -> tuple[mx.array, mx.array]:
    """One row's logits for what it keeps, fed block by block and at once."""
    kept = [block[row][: keep[row]] for block, (_, keep) in zip(blocks, STEPS, strict=True)]
    buffers = _filled(target, new, prompt)
    stepwise = mx.concatenate([_feed(target, buffers, ids) for ids in kept], axis=1)
    whole = _feed(target, new(), [*prompt, *(token for ids in kept for token in ids)])
    return stepwise, whole[:, len(prompt) :]


def _together(
    target: Any, new: Callable[[], SingleBuffers], prompts: list[list[int]], blocks: list[list[list[int]]]
) -> list[mx.array]:
    rows = RaggedBuffers(_filled(target, new, prompts[0]))
    for prompt in prompts[1:]:
        rows.admit(_filled(target, new, prompt))
    said: list[list[mx.array]] = [[] for _ in prompts]
    for block, (_, keep) in zip(blocks, STEPS, strict=True):
        logits, _ = rows.forward(target, mx.array(block))
        mx.eval(logits)
        rows.settle(keep, tuple(tuple(ids) for ids in block))
        mx.eval(rows.state)
        for i, count in enumerate(keep):
            said[i].append(logits[i : i + 1, :count])
    return [mx.concatenate(parts, axis=1) for parts in said]


def _filled(target: Any, new: Callable[[], SingleBuffers], prompt: list[int]) -> SingleBuffers:
    buffers = new()
    _feed(target, buffers, prompt)
    return buffers


def _feed(target: Any, buffers: SingleBuffers, ids: list[int]) -> mx.array:
    logits, _ = buffers.forward(target, mx.array([ids]))
    buffers.settle((len(ids),), (tuple(ids),))
    mx.eval(logits, buffers.state)
    return logits
