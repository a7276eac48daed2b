"""What a drafter is told is computed when it is told: nothing piles up over a long prompt, or while another one drafts."""

import io

import mlx.core as mx
import pytest

from dspark.caps import FixedCap, ParkCap
from dspark.engine import bind
from dspark.models.target import Target
from dspark.pipeline import chain
from dspark.stages.accept import Greedy
from dspark.stages.base import AbstractDraft
from dspark.stages.draft import DSpark, Lookup, NoDraft, block, first_of
from dspark.stages.draft.block import BlockDraft
from dspark.stages.prefill import Prefill
from dspark.stages.rollback import RollbackAuto
from dspark.stages.verify import Verify
from tests.families import build
from tests.tiny_drafters import random_drafter

PROMPT = tuple(i % 7 + 3 for i in range(60))


@pytest.fixture(scope="module")
def target():
    return Target(build("llama"), {"model_type": "llama"}, "llama")


@pytest.fixture(scope="module")
def drafter(target, tmp_path_factory):
    return DSpark(random_drafter(tmp_path_factory.mktemp("drafter"), "vanilla", target), bits=0)


def operations(carry):
    """MLX operations that what a block drafter holds still needs."""
    drawn = io.StringIO()
    mx.export_to_dot(drawn, *carry.context.state, *carry.waiting)
    return drawn.getvalue().count("shape=rectangle")


def session_of(target, draft, cap):
    engine = bind(chain(Prefill(chunk=8), draft, Verify(), Greedy(), RollbackAuto(), cap=cap), target)
    return engine.open(PROMPT, max_tokens=40)


def left_over(target, draft, cap, rounds=8):
    """(operations left behind prefill, behind some rounds)."""
    with session_of(target, draft, cap) as session:
        carry_of = lambda carry: carry[-1] if isinstance(draft, type(first_of(NoDraft()))) else carry
        behind_prefill = operations(carry_of(session.state.draft))
        for _ in range(rounds):
            session.step()
        return behind_prefill, operations(carry_of(session.state.draft))


PARKED = ParkCap(FixedCap(3), probe_every=30, patience=1)


@pytest.mark.parametrize("kind", ["drafting", "parked", "lookup drafts"])
def test_nothing_piles_up(target, drafter, kind):
    draft = first_of(Lookup(min_ngram=1, max_ngram=2), drafter) if kind == "lookup drafts" else drafter
    assert left_over(target, draft, PARKED if kind == "parked" else FixedCap(3)) == (0, 0)


def test_what_piles_up_is_seen(target, drafter, monkeypatch):
    monkeypatch.setattr(BlockDraft, "pending", AbstractDraft.pending)
    behind_prefill, behind_parked = left_over(target, drafter, PARKED)
    assert behind_prefill > 50
    assert behind_parked > 50


def test_only_drafters_with_something_to_compute_are_asked(target, drafter):
    pipes = [chain(Prefill(), d, Verify(), Greedy(), RollbackAuto()) for d in (Lookup(), drafter.bind(target))]
    assert [pipe.pends for pipe in pipes] == [False, True]


@pytest.mark.parametrize("mixed", [False, True])
def test_plain_steps_taken_in_together_leave_the_context_of_each_alone(target, drafter, monkeypatch, mixed):
    """Keys and values behind 40 parked steps, 32 of which waited, are those of a drafter that took in each at once. Negative
    control: the same steps taken in in another order."""

    def context(together):
        monkeypatch.setattr(block, "TOGETHER", together)
        with session_of(target, drafter, FixedCap(0)) as session:
            for _ in range(39):
                session.step()
            carry, stage = session.state.draft, session.engine.pipeline.draft
            assert bool(carry.waiting) == bool(together)
            if mixed:
                carry = carry._replace(waiting=carry.waiting[::-1])
            held = stage._absorbed(carry).context
            return [array[:, :, : held.starts[0]] for array in held.state]

    pairs = zip(context(32), context(0), strict=True)
    # Rows of one product or of several: float32 sums in another order.
    same = all(mx.allclose(waited, alone, rtol=1e-4, atol=1e-4).item() for waited, alone in pairs)
    assert same is not mixed
