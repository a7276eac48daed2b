"""A tiny target and a tiny DSpark drafter whose forwards and rounds are launches, through the kernels' stand-ins for a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama

from dspark.caps.base import AbstractCap
from dspark.engine import Engine, bind
from dspark.kernels import stack_draft
from dspark.models.heads import Head, HeadConfig, LayerConfig
from dspark.models.lending import lend
from dspark.models.target import Target
from dspark.pipeline import chain
from dspark.stages.accept import Greedy
from dspark.stages.draft import DSpark, Lookup, NoDraft
from dspark.stages.draft.block import BlockDraft
from dspark.stages.prefill import Prefill
from dspark.stages.rollback import rollback_auto
from dspark.stages.verify import Verify
from tests import stack_trials as trials
from tests.precompiled_kernel import stand_in

F16 = mx.float16
CASE = trials.Case(llama, F16, tied=False, warps=2, splits=2, blocks=2, hidden=48, heads=2, vocab=88, mlp=64)
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)
LENGTH = 36
BLOCK = 7
LOOKUP = Lookup(min_ngram=2, max_ngram=3, base=3)
# What a drafter knows of the text weighs about as much as the noise of its body: both decide.
KNOWN = 5.0


class Call(NamedTuple):
    """A round: rows of taps; how many count, None where nobody on the host knew; tokens drafted."""

    taken: int
    keep: int | None
    tokens: mx.array


class Rounds(stack_draft.DraftRound):
    """A drafter's rounds by the stand-in, and what was asked of it."""

    def __init__(self, head: Head, kind: stack_draft.Round, blocks: int, target: Any = None, change: Any = None):
        super().__init__(head, kind, blocks, target)
        given = len(self._fixed) + stack_draft.ARRAYS
        more = {} if change is None else {"change": change}
        # Scratch, what else blocks share, and the context's buffer.
        self._kernel = stand_in(stack_draft.program(self.kind), written=(given + 1, given + 2, given + 4), **more)
        self.calls: list[Call] = []

    @property
    def kernel(self) -> Any:
        return self._kernel

    def __call__(self, context: Any, taps: Any, keep: int | None, anchor: mx.array, count: int, slots: int) -> mx.array:
        tokens = super().__call__(context, taps, keep, anchor, count, slots)
        parts = () if taps is None else (taps,) if isinstance(taps, mx.array) else taps
        self.calls.append(Call(sum(part.shape[1] for part in parts), keep, tokens))
        return tokens

    @property
    def foreseen(self) -> int:
        return sum(call.keep is None for call in self.calls)


@cache
def model() -> Any:
    return trials.target(CASE)


def target() -> Target:
    """A target whose forwards are launches where they can be."""
    made = Target(model(), {"model_type": "llama"}, "tiny")
    made.launch = trials.forward(CASE, model())
    return made


def head(to: Target, text: Sequence[int], *, causal: bool = False, launched: bool = True, **changes: Any) -> Head:
    """A random drafter that has an idea of which token follows which in a text."""
    fields: dict[str, Any] = {
        "kind": "dspark",
        "block_size": BLOCK,
        "anchor_predicts": True,
        "mask_token_id": CASE.vocab - 1,
        "target_layer_ids": (1, 0),
        "vocab_size": CASE.vocab,
        "hidden_size": CASE.hidden,
        "intermediate_size": 32,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 64,
        "layers": (LayerConfig(causal=causal),),
        "target_hidden_size": CASE.hidden,
        "markov": "vanilla",
        "markov_rank": CASE.vocab,
        **changes,
    }
    made, rng = Head(HeadConfig(**fields)), np.random.default_rng(0)
    arrays = {
        name: np.float32(
            rng.normal(0, 1 / np.sqrt(a.shape[-1]), a.shape) if a.ndim > 1 else 1 + 0.1 * rng.normal(size=a.shape)
        )
        for name, a in tree_flatten(made.parameters())
    }
    table = np.zeros((CASE.vocab, CASE.vocab), np.float32)
    pairs = Counter(pairwise(text))
    for (before, after), count in pairs.items():
        usual = count == max(n for (other, _), n in pairs.items() if other == before)
        table[after, before] = KNOWN if usual else KNOWN / 2
    arrays["markov_head.markov_w1.weight"], arrays["markov_head.markov_w2.weight"] = np.eye(CASE.vocab), table
    made.update(tree_unflatten([(name, mx.array(a)) for name, a in arrays.items()]))
    made.set_dtype(F16)
    lend(made, to)
    if launched:
        made.launch = rounds(made, to)
    return made


def rounds(made: Head, to: Target, change: Any = None) -> Rounds:
    kind = stack_draft.study(made, F16)
    assert isinstance(kind, stack_draft.Round), kind
    kind = kind._replace(layers=kind.layers._replace(warps=CASE.warps, splits=CASE.splits))
    return Rounds(made, kind, CASE.blocks, to, change)


@cache
def plain(prompt: tuple[int, ...] = PROMPT, length: int = LENGTH) -> tuple[int, ...]:
    """Plain decoding by launches."""
    with engine(NoDraft(), target()).open(prompt, max_tokens=length) as session:
        list(session)
    return session.result.tokens


def dspark(to: Target, **how: Any) -> BlockDraft:
    return BlockDraft(DSpark("tiny"), head(to, (*PROMPT, *plain()), **how))


def engine(draft: Any, to: Target, accept: Any = None, cap: Any = BLOCK, chunk: int = 2048, **options: Any) -> Engine:
    pipeline = chain(Prefill(chunk=chunk), draft, Verify(), accept or Greedy(), rollback_auto(), cap=cap)
    return bind(pipeline, to, **options)


class ScriptedCap(AbstractCap):
    """Caps one after another, over and over; `shapes`: what is made of a block (drafts to keep, rows to verify), likewise."""

    def __init__(self, caps: Sequence[int]):
        self.caps = tuple(caps)

    def init(self, costs: Any = None) -> int:
        return 0

    def propose(self, carry: int) -> int:
        return self.caps[carry % len(self.caps)]

    def sure(self, carry: int) -> int:
        return self.propose(carry + 1)

    def observe(self, carry: int, event: Any) -> int:
        return carry + 1

    def reason(self, carry: int) -> str:
        return "pinned"

    def parked_rounds(self, carry: int) -> int:
        ahead = [self.caps[(carry + i) % len(self.caps)] for i in range(len(self.caps))]
        return next((i for i, cap in enumerate(ahead) if cap), len(ahead))


class FittedCap(ScriptedCap):
    """The same, and blocks are cut and padded."""

    SHAPES = ((4, 8), (2, 3), (0, 5), (9, 0), (1, 13), (3, 4))

    def fit(self, carry: int, source: str, offered: int) -> tuple[int, int]:
        return self.SHAPES[carry % len(self.SHAPES)]
