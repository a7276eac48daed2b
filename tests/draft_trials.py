"""Tiny DSpark drafters for the kernel of a whole round (dspark/kernels/stack_draft.cu), and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from dspark.kernels import stack_draft
from dspark.models.heads import Context, Head, HeadConfig, LayerConfig
from dspark.models.heads.context import LayerRows
from dspark.models.lending import lend_tables
from tests.precompiled_kernel import in_place, stand_in
from tests.stack_trials import bits

VOCAB, HIDDEN, TARGET = 150, 64, 48
Step = tuple[int, int, int]


class Case(NamedTuple):
    """A drafter and how its kernel is laid out. reduced: rows of its head, None for all."""

    dtype: mx.Dtype
    taps: mx.Dtype
    causal: bool
    warps: int
    splits: int
    blocks: int
    lm_head: str = "own"
    reduced: int | None = None
    dim: int = 64
    heads: int = 2
    kv_heads: int = 1
    anchor: bool = True
    block: int = 7
    hidden: int = HIDDEN
    layers: int = 2
    origin: int = 0


def config(case: Case, **changes: Any) -> HeadConfig:
    fields = {
        "kind": "dspark",
        "block_size": case.block,
        "anchor_predicts": case.anchor,
        "mask_token_id": 5,
        "target_layer_ids": (0, 1),
        "vocab_size": VOCAB,
        "hidden_size": case.hidden,
        "intermediate_size": 96,
        "num_heads": case.heads,
        "num_kv_heads": case.kv_heads,
        "head_dim": case.dim,
        "layers": (LayerConfig(causal=case.causal),) * case.layers,
        "target_hidden_size": TARGET,
        "rms_norm_eps": 0.05,
        "embedding": "borrowed" if case.lm_head == "borrowed" else "own",
        "lm_head": case.lm_head,
        "markov": "vanilla",
        "markov_rank": 16,
        "draft_vocab_size": case.reduced,
    }
    return HeadConfig(**{**fields, **changes})


def random_head(given: HeadConfig) -> Head:
    """Numbers that are large enough to matter: a norm's weights are around one, a matrix's around zero."""
    made = Head(given)
    mx.random.seed(5)
    # A chain that says as much as the block does.
    scale = lambda name: 0.6 if "markov" in name else 0.2
    arrays = [
        (n, scale(n) * mx.random.normal(a.shape) + float(a.ndim == 1)) for n, a in tree_flatten(made.parameters())
    ]
    made.update(tree_unflatten(arrays))
    return made


class Trial(NamedTuple):
    """A drafter, the same in float32, and what lends them tables."""

    case: Case
    head: Head
    exact: Head
    target: Any
    taps: mx.array


@lru_cache(None)
def trial(case: Case) -> Trial:
    head, twin = random_head(config(case)), Head(config(case))
    head.set_dtype(case.dtype)
    twin.update(tree_unflatten([(name, a.astype(mx.float32)) for name, a in tree_flatten(head.parameters())]))
    names = np.sort(np.random.RandomState(1).choice(VOCAB, case.reduced or 1, False))
    lenders = []
    for each, dtype in ((head, case.dtype), (twin, mx.float32)):
        mx.random.seed(6)
        lender = SimpleNamespace(embedding=nn.Embedding(VOCAB, case.hidden), vocab_size=VOCAB)
        lender.lm_head_raw = nn.Linear(case.hidden, VOCAB, bias=False)
        for module in (lender.embedding, lender.lm_head_raw):
            module.weight = (0.2 * mx.random.normal(module.weight.shape)).astype(case.dtype).astype(dtype)
        if case.reduced:
            each.reduce_vocabulary(mx.array(names))
        lend_tables(each, lender)
        lenders.append(lender)
    taps = mx.random.normal((1, 80, 2 * TARGET), key=mx.random.key(9)).astype(case.taps)
    return Trial(case, head, twin, lenders[0], taps)


class Rounds(stack_draft.DraftRound):
    """A drafter's rounds through the kernel's stand-in. `change` edits the text."""

    def __init__(self, t: Trial, change: Callable[[str], str] = lambda text: text):
        kind = stack_draft.study(t.head, t.case.taps)
        assert isinstance(kind, stack_draft.Round), kind
        kind = kind._replace(layers=kind.layers._replace(warps=t.case.warps, splits=t.case.splits))
        super().__init__(t.head, kind, t.case.blocks, t.target)
        self._run = stand_in(stack_draft.program(self.kind), change, self.written)

    @property
    def kernel(self) -> Any:
        return self._run

    @property
    def written(self) -> tuple[int, ...]:
        """The inputs that the kernel writes into: its scratch, what else blocks share, and the context's buffer."""
        n = len(self._fixed)
        n += stack_draft.ARRAYS
        return n + 1, n + 2, n + 4

    def logits(self, count: int) -> np.ndarray:
        """Those of the last round, before the chain: float32 [count, rows of the head]."""
        one = self.kind.layers
        begins = 8 * (one.hidden + one.hidden // 16 + one.layers * one.keys)
        extra = np.array(self._scratch[1]).view(np.float32)[begins:]
        return extra[: self.kind.slots * one.vocab].reshape(-1, one.vocab)[self.kind.first :][:count].copy()


def opened(t: Trial, head: Head | None = None) -> Context:
    return (head or t.head).make_context((t.case.origin,))


def behind(context: Context, kept: int) -> Context:
    return Context(context.rows, (context.starts[0] + kept,))


def ask(t: Trial, way: Rounds, context: Context, at: int, step: Step) -> tuple[mx.array, Context]:
    """One round: (taken, keep, count), the taps beginning at row `at`."""
    taken, keep, count = step
    taps = t.taps[:, at : at + taken] if taken else None
    assert way.takes(context, taps)
    tokens = way(context, taps, keep, anchor(at + keep), count, t.head.config.slots_for(count))
    return tokens, behind(context, keep)


def anchor(at: int) -> mx.array:
    return mx.array([[(7 * at + 3) % VOCAB]])


def by_mlx(t: Trial, head: Head, context: Context, at: int, step: Step) -> tuple[np.ndarray, Context]:
    """The same by MLX: base logits [count, rows of the head]."""
    taken, keep, count = step
    if taken:
        context = head.absorb(context, t.taps[:, at : at + taken], keep)
    hidden = head.block(context, anchor(at + keep), head.config.slots_for(count))
    return np.array(head.base_logits(head.predicting(hidden, count))[0]), context


def held(context: Context) -> list[np.ndarray]:
    """Keys and values of each layer, a row of numbers for a token."""
    end = context.starts[0] - context.rows[0].origins[0]
    arrays = [a[0, :, :end].astype(mx.float32) for row in context.rows for a in (row.keys, row.values)]
    return [np.array(a.swapaxes(0, 1).reshape(end, -1)) for a in arrays]


def buffers(rows: Sequence[LayerRows]) -> list[mx.array]:
    return [a for row in rows for a in (row.keys, row.values)]


def spoil(context: Context) -> list[np.ndarray]:
    """No numbers behind what is held, in the buffers' own memory. Gives all bits."""
    end, spoilt = context.starts[0] - context.rows[0].origins[0], []
    for array in buffers(context.rows) if context.rows[0].keys is not None else []:
        now = bits(array)
        now[:, :, end:] = 0x7FFF
        in_place(array, now)
        spoilt.append(now)
    return spoilt


def untouched(before: list[np.ndarray], context: Context, start: int, end: int) -> bool:
    """Whether buffers are what they were, but for the rows from `start` to `end`."""
    for old, array in zip(before, buffers(context.rows) if before else [], strict=True):
        new = bits(array)
        if old.shape == new.shape and not (
            np.array_equal(old[:, :, :start], new[:, :, :start]) and np.array_equal(old[:, :, end:], new[:, :, end:])
        ):
            return False
    return True


def far(made: np.ndarray, exact: np.ndarray, own: np.ndarray) -> float:
    """The largest error of a row, in errors of MLX's own way over all rows: both root mean squares."""
    if not len(exact):
        return 0.0
    found = np.sqrt(np.square(made - exact).mean(-1)).max() / np.sqrt(np.square(own - exact).mean())
    return np.inf if np.isnan(found) else float(found)


def chained(t: Trial, logits: np.ndarray, first: mx.array, tokens: np.ndarray) -> float:
    """How far tokens are from the best that a chain over these logits can take, at worst: in logits."""
    markov = t.exact.markov_head
    after, second = (np.array(m.weight) for m in (markov.markov_w1, markov.markov_w2))
    names = np.arange(VOCAB) if t.head.target_ids is None else np.array(t.head.target_ids)
    if not set(tokens.tolist()) <= set(names.tolist()):
        return np.inf
    previous, worst = int(first.item()), 0.0
    for row, token in zip(logits, tokens, strict=True):
        scores = row + second @ after[previous]
        worst = max(worst, float(scores.max() - scores[names.tolist().index(token)]))
        previous = int(token)
    return worst


def worst(t: Trial, way: Rounds, steps: Sequence[Step], enough: float = np.inf) -> float:
    """The largest of the errors of logits, keys and values, in MLX's own; infinite where anything is written that is not new, and
    where tokens are not the anchor and the chain's. Stops at the first above `enough`."""
    mine, exact, own = opened(t), opened(t, t.exact), opened(t)
    at, most = 0, 0.0
    for step in steps:
        taken, keep, count = step = (*step[:2], min(step[2], t.head.config.num_drafts))
        old, start = spoil(mine), mine.starts[0] - t.case.origin
        tokens, mine = ask(t, way, mine, at, step)
        logits = way.logits(count)
        want, exact = by_mlx(t, t.exact, exact, at, step)
        near, own = by_mlx(t, t.head, own, at, step)
        most = max(most, far(logits, want, near))
        most = max(most, *map(far, held(mine), held(exact), held(own)))
        end = start + max(taken, keep + (t.head.config.slots_for(count) if count else 0))
        if not untouched(old, mine, start, end):
            most = np.inf
        if tokens[:, :1].tolist() != anchor(at + keep).tolist():
            most = np.inf
        drafts = np.array(tokens)[0, 1:]
        # Sums of a few numbers, in another order.
        if not chained(t, logits, anchor(at + keep), drafts) <= 1e-4:
            most = np.inf
        # Tokens are float32's but where it hardly prefers them.
        if not chained(t, want, anchor(at + keep), drafts) <= 2 * np.abs(logits - want).max() + 1e-4:
            most = np.inf
        at += keep
        if not most <= enough:
            break
    return most
