"""A drafter's context is right whoever drafted, however a session was continued, and whichever twin goes on."""

from __future__ import annotations

from functools import cache

import attrs
import mlx.core as mx
import pytest

from dspark.engine import bind
from dspark.models.heads import Head
from dspark.models.heads.context import LayerRows
from dspark.models.target import Target
from dspark.pipeline import chain
from dspark.records import Opening, Settled
from dspark.session import SessionOptions
from dspark.stages.accept import Greedy, Rejection
from dspark.stages.base import AbstractDraft
from dspark.stages.draft import DFlash2, DSpark, Lookup, NoDraft, first_of
from dspark.stages.draft.block import BlockDraft
from dspark.stages.prefill import Prefill
from dspark.stages.rollback import Checkpoint, rollback_auto
from dspark.stages.verify import Verify
from dspark.stages.warp import temperature, warps
from tests.families import build
from tests.tiny_drafters import random_drafter

PROMPT = (*range(3, 24), 7, 8, 9, 10, 7, 8, 9)
CAP, LENGTH = 4, 24
KINDS = {"vanilla": DSpark, "causal": DSpark, "dflash2": DFlash2}


@attrs.frozen(eq=False)
class Spy(AbstractDraft):
    """A drafter, and what it proposed: (position of the anchor, tokens)."""

    inner: AbstractDraft
    seen: list = attrs.field(factory=list)

    needs = property(lambda self: self.inner.needs)
    target_layer_ids = property(lambda self: self.inner.target_layer_ids)
    sources = property(lambda self: self.inner.sources)
    knows_q = property(lambda self: self.inner.knows_q)
    longest = property(lambda self: self.inner.longest)

    def bind(self, target):
        return Spy(self.inner.bind(target), self.seen)

    def init(self, opening):
        return self.inner.init(opening)

    def resume(self, carry, opening):
        return self.inner.resume(carry, opening)

    def skip(self, settled, carry):
        return self.inner.skip(settled, carry)

    def __call__(self, settled, carry, cap):
        proposal, carry = self.inner(settled, carry, cap)
        self.seen.append((settled.start[0], proposal.tokens))
        return proposal, carry


@cache
def target(family: str) -> Target:
    return Target(build(family), {"model_type": family}, family)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    root = tmp_path_factory.mktemp("drafters")
    return lambda name, family: KINDS[name](
        random_drafter(root / family / name, name, target(family)), bits=0, window=9 if name == "vanilla" else 4096
    )


def engine(draft, family, accept=None, rollback=None):
    stages = (Prefill(chunk=8), draft, Verify(), accept or Greedy(), rollback or rollback_auto())
    return bind(chain(*stages, cap=CAP), target(family))


def afresh(draft: BlockDraft, to: Target, text: tuple[int, ...], cap: int) -> list[int]:
    """What a drafter proposes behind `text` when it is told all of it by one forward."""
    held = len(text) - 1
    _, taps = to(mx.array([text[:-1]]), to.make_caches(), draft.target_layer_ids)
    opening = Opening(to, (text,), (0,), Greedy())
    settled = Settled(mx.array([[text[-1]]]), (text,), taps, (held,), (held,))
    return draft(settled, draft.init(opening), cap)[0].tokens.tolist()[0]


def bound(made) -> BlockDraft:
    """The drafter with its weights inside an engine's pipeline."""
    draft = made.pipeline.draft
    draft = draft.branches[-1] if hasattr(draft, "branches") else draft
    return draft.inner if isinstance(draft, Spy) else draft


def differing(made, family, seen, text) -> list[int]:
    """Positions at which what was proposed is not what the drafter proposes there afresh."""
    assert len(seen) >= 3
    wrong = []
    for start, tokens in seen:
        proposed = tokens.tolist()[0]
        expected = afresh(bound(made), target(family), text[: start + 1], len(proposed))
        wrong += [] if proposed == expected else [start]
    return wrong


def hybrid(drafter, name, family):
    spy = Spy(drafter(name, family))
    return spy, first_of(Lookup(min_ngram=2, max_ngram=3), spy)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
@pytest.mark.parametrize("name", ["vanilla", "causal"])
def test_a_hybrids_drafter_proposes_as_one_that_always_drafted(drafter, name, family):
    spy, draft = hybrid(drafter, name, family)
    made = engine(draft, family)
    with made.open(PROMPT, max_tokens=LENGTH) as session:
        list(session)
    assert {"lookup", KINDS[name].kind} <= set(session.result.by_source), "both drafted"
    assert differing(made, family, spy.seen, PROMPT + session.result.tokens) == []


def test_rows_fed_again_are_absorbed_once(drafter):
    spy = Spy(drafter("vanilla", "lfm2"))
    made = engine(spy, "lfm2", rollback=Checkpoint())
    with made.open(PROMPT, max_tokens=LENGTH) as session:
        list(session)
    assert differing(made, "lfm2", spy.seen, PROMPT + session.result.tokens) == []


def test_taps_that_are_forgotten_are_caught(drafter, monkeypatch):
    """The control: a context that moves on without the rows that another branch committed."""
    skip = BlockDraft.skip

    def blind(self, settled, carry):
        if settled.taps is not None and settled.taps.shape[1] <= CAP + 1:
            settled = settled._replace(taps=mx.zeros_like(settled.taps))
        return skip(self, settled, carry)

    monkeypatch.setattr(BlockDraft, "skip", blind)
    spy, draft = hybrid(drafter, "dflash2", "llama")
    made = engine(draft, "llama")
    with made.open(PROMPT, max_tokens=LENGTH) as session:
        list(session)
    monkeypatch.undo()
    assert len(differing(made, "llama", spy.seen, PROMPT + session.result.tokens)) >= 3


# ---- a prompt that goes on from another session ----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "family"), [("vanilla", "llama"), ("causal", "lfm2"), ("dflash2", "gemma3_text")])
@pytest.mark.parametrize("more", [(), (11, 12, 13), tuple(range(30, 50))], ids=["nothing", "some", "chunks"])
def test_a_continued_prompt_fills_the_drafters_context(drafter, name, family, more):
    spy, draft = hybrid(drafter, name, family)
    made = engine(draft, family)
    with made.open(PROMPT, max_tokens=LENGTH) as first:
        list(first)
    prompt = PROMPT + first.result.tokens + more
    spy.seen.clear()
    with made.open(prompt, max_tokens=LENGTH, options=SessionOptions(reuse=first)) as second:
        list(second)
    assert second.result.cached_tokens == len(PROMPT) + LENGTH - 1
    assert differing(made, family, spy.seen, prompt + second.result.tokens) == []
    with engine(NoDraft(), family).open(prompt, max_tokens=LENGTH) as alone:
        list(alone)
    assert second.result.tokens == alone.result.tokens


def test_a_prompt_that_turns_elsewhere_is_told_from_its_start(drafter):
    spy, draft = hybrid(drafter, "causal", "llama")
    made = engine(draft, "llama")
    with made.open(PROMPT, max_tokens=LENGTH) as first:
        list(first)
    prompt = (*PROMPT[:-2], 40, 41, 40, 41, 40)
    spy.seen.clear()
    with made.open(prompt, max_tokens=LENGTH, options=SessionOptions(reuse=first)) as second:
        list(second)
    assert differing(made, "llama", spy.seen, prompt + second.result.tokens) == []


@pytest.mark.parametrize("resumes", [True, False])
def test_a_continued_prompt_draws_by_its_own_seed_and_options(drafter, resumes, monkeypatch):
    if not resumes:
        monkeypatch.setattr(BlockDraft, "resume", lambda self, carry, opening: carry)
    cold, warm = (Rejection(warps(temperature(t))) for t in (0.5, 1.5))
    spy = Spy(drafter("vanilla", "llama"))
    made = engine(spy, "llama")

    def answer(prompt, accept, seed, reuse=None):
        spy.seen.clear()
        own = attrs.evolve(made, pipeline=attrs.evolve(made.pipeline, accept=accept))
        with own.open(prompt, max_tokens=LENGTH, seed=seed, options=SessionOptions(reuse=reuse)) as session:
            list(session)
        return session, [tokens.tolist() for _, tokens in spy.seen]

    first, _ = answer(PROMPT, cold, 1)
    prompt = PROMPT + first.result.tokens
    alone, drafts_alone = answer(prompt, warm, 2)
    continued, drafts = answer(prompt, warm, 2, reuse=first)
    assert continued.result.cached_tokens > 0
    assert ((continued.result.tokens, drafts) == (alone.result.tokens, drafts_alone)) == resumes


# ---- forks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_forks_of_a_session_go_their_own_ways(drafter, name):
    assert max(_strayed(drafter, name)) < 1e-5


def test_twins_that_share_a_context_are_caught(drafter, monkeypatch):
    monkeypatch.setattr(LayerRows, "__deepcopy__", lambda self, memo: self, raising=False)
    assert max(_strayed(drafter, "vanilla")[1:]) > 1e-2


def _strayed(drafter, name) -> list[float]:
    """Fork a session, let both twins draft in turns and say different things, and compare each one's context with one that
    was told its text at once: the largest differences of keys, which are of order 1. Equal sums give equal floats on the
    bundled BLAS; 1e-5 leaves room for another order of 64 terms."""
    _, draft = hybrid(drafter, name, "llama")
    made = engine(draft, "llama", Rejection(warps(temperature(1.0))))
    expected = made.open(PROMPT, max_tokens=LENGTH, seed=3)
    list(expected)
    session = made.open(PROMPT, max_tokens=LENGTH, seed=3)
    for _ in range(4):
        session.step()
    twin = session.fork()
    state, (lookup, carry) = twin._state, twin._state.draft
    twin._state = state._replace(draft=(lookup, carry._replace(seeds=(99,))), accept=state.accept._replace(seeds=(99,)))
    steps = [1]
    while any(steps):
        steps = [one.step() for one in (session, twin)]
    assert twin.result.tokens != expected.result.tokens
    strayed = [0.0 if session.result.tokens == expected.result.tokens else 1.0]
    for one in (session, twin):
        context, text = one._state.draft[1].context, PROMPT + one.result.tokens
        start = context.starts[0]
        fresh = context_of(bound(made).head, target("llama"), text[:start], context)
        for mine, other in zip(context.rows, fresh.rows, strict=True):
            strayed.append(mx.abs(visible(mine, start) - visible(other, start)).max().item())
    return strayed


def context_of(head: Head, to: Target, text, like):
    """A context that was told `text` at once, with the windows of another."""
    _, taps = to(mx.array([text]), to.make_caches(), head.config.target_layer_ids)
    limits = [layer.limit for layer in like.rows]
    fresh = head.make_context((0,), limits[0])
    return head.absorb(fresh, taps)


def visible(layer, start):
    """Keys of the last rows that a block at `start` sees."""
    held = start - layer.origins[0]
    seen = held if layer.limit is None else min(held, layer.limit)
    return layer.keys[:, :, held - seen : held]
