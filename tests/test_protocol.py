"""What every registered stage keeps: frozen, final, self-describing, and true to its role's records."""

import attrs
import mlx.core as mx
import pytest

from dspark.buffers.plan import Plan
from dspark.caps import AbstractCap
from dspark.errors import BindError, ChainError
from dspark.pipeline import chain
from dspark.records import Opening, Proposal, RoundEvent, RowCommit, Settled
from dspark.stages.accept import Greedy
from dspark.stages.base import AbstractAccept, AbstractDraft, AbstractRollback, AbstractStage, AbstractVerify
from dspark.stages.draft import Lookup, NoDraft, first_of
from dspark.stages.draft.block import AbstractBlock
from dspark.stages.prefill import Prefill
from dspark.stages.registry import KINDS, kind_of, register_draft
from dspark.stages.rollback import KvTrim
from dspark.stages.verify import Verify
from tests.fakes import HashTarget, ScriptedDraft

ROLES = {"draft": AbstractDraft, "accept": AbstractAccept, "rollback": AbstractRollback, "cap": AbstractCap}
STAGES = [(role, kind) for role in ROLES for kind in sorted(KINDS[role])]
PROMPTS = ((5, 6, 5, 6, 5), (1, 2, 3))


def build(cls):
    """A stage with its defaults, and something where it has none."""
    fill = {"branches": (NoDraft(), Lookup()), "inner": KINDS["cap"]["fixed"](), "drafter": "some/drafter"}
    needed = [f.name for f in attrs.fields(cls) if f.init and f.default is attrs.NOTHING]
    return cls(**{name: fill[name] for name in needed})


@pytest.mark.parametrize(("role", "kind"), STAGES)
def test_a_stage_is_a_frozen_final_class_of_its_role(role, kind):
    cls = KINDS[role][kind]
    assert issubclass(cls, ROLES[role])
    assert [sub for sub in cls.__subclasses__() if sub.__module__.startswith("dspark.")] == []
    assert cls.__doc__
    assert kind_of(role, cls) == kind
    stage = build(cls)
    assert stage == build(cls)
    for field in attrs.fields(cls):
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(stage, field.name, None)
    if isinstance(stage, AbstractStage):
        assert stage.needs <= {"logits", "taps", "embed", "head", "host_tokens"}


def settled(rows):
    prompts = PROMPTS[:rows]
    anchor = mx.array([[p[-1]] for p in prompts])
    return Settled(anchor, tuple(prompts), None, (0,) * rows, tuple(len(p) - 1 for p in prompts))


def ready(draft):
    return not isinstance(draft, AbstractBlock)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", sorted(k for k, c in KINDS["draft"].items() if not issubclass(c, AbstractBlock)))
def test_a_drafter_keeps_its_contract(kind, rows):
    draft = build(KINDS["draft"][kind])
    opening = Opening(HashTarget(), PROMPTS[:rows], tuple(range(rows)), Greedy())
    carry = draft.skip(settled(rows), draft.init(opening))
    proposal, carry = draft(settled(rows), carry, 3)
    assert isinstance(proposal, Proposal)
    assert proposal.tokens.shape[0] == rows == len(proposal.offered) == len(proposal.source)
    assert all(0 <= n <= proposal.tokens.shape[1] <= 3 for n in proposal.offered)
    assert all(s in (*draft.sources, "plain") for s in proposal.source)
    assert (proposal.anchor is not None, proposal.start) == (True, settled(rows).start)
    nothing, _ = draft(settled(rows), carry, 0)
    assert nothing.tokens.shape == (rows, 0)
    alone = draft.take(carry, [rows - 1])
    both = draft.join(alone, alone)
    pair = Settled(mx.array([[3], [3]]), ((3,), (3,)), None, (0, 0), (settled(rows).start[-1],) * 2)
    assert draft(pair, both, 2)[0].tokens.shape[0] == 2


@pytest.mark.parametrize("kind", sorted(k for k, c in KINDS["draft"].items() if issubclass(c, AbstractBlock)))
def test_a_drafter_without_weights_says_so(kind):
    draft = build(KINDS["draft"][kind])
    with pytest.raises(BindError, match="bind the pipeline"):
        draft.init(Opening(HashTarget(), PROMPTS, (0, 0), Greedy()))


@pytest.mark.parametrize("kind", sorted(KINDS["rollback"]))
def test_a_rollback_plans_for_plain_caches(kind):
    assert isinstance(build(KINDS["rollback"][kind]).plan(HashTarget()), Plan)


@pytest.mark.parametrize("kind", sorted(KINDS["cap"]))
def test_a_cap_keeps_its_contract(kind):
    cap = build(KINDS["cap"][kind])
    carry = cap.init(None)
    for i in range(20):
        proposed = cap.propose(carry)
        assert isinstance(proposed, int)
        assert proposed >= 0
        assert cap.reason(carry).split()[0] in {"pinned", "calibrated", "adaptive", "parked", "default", "uncalibrated"}
        assert cap.parked_rounds(carry) >= 0
        rows = (RowCommit(0, (1, 2), 1 if i % 3 else 0, proposed, "lookup" if proposed else "plain"),)
        event = RoundEvent(i + 1, rows, proposed, cap.reason(carry), proposed + 1, 1, 5.0, (i,))
        carry = cap.observe(cap.ponder(carry, (i,)), event)
    assert isinstance(cap.propose(cap.again(carry, None)), int)


# ---- chain ----------------------------------------------------------------------------------------------------------

GOOD = (Prefill(), Lookup(), Verify(), Greedy(), KvTrim())


def test_a_chain_in_order_is_a_pipeline():
    assert chain(*GOOD).draft == Lookup()


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ((), "chain\\(\\) takes prefill, draft, verify, accept, rollback; got 0 stages"),
        (GOOD[:4], "got 4 stages"),
        ((*GOOD, KvTrim()), "got 6 stages"),
        (
            (GOOD[0], GOOD[2], GOOD[1], *GOOD[3:]),
            "the draft place of the chain holds Verify, but Verify is a verify stage",
        ),
        ((*GOOD[:3], Lookup(), KvTrim()), "the accept place of the chain holds Lookup"),
        (("x", *GOOD[1:]), "str is no stage"),
    ],
)
def test_a_chain_out_of_order_is_refused(stages, says):
    with pytest.raises(ChainError, match=says):
        chain(*stages)


@attrs.frozen
class Strange(AbstractVerify):
    """A verify stage that claims to take something else."""

    takes = Settled

    def __call__(self, target, buffers, proposal, target_layer_ids=()):
        raise NotImplementedError


def test_records_that_do_not_fit_are_refused():
    with pytest.raises(ChainError, match="Strange takes Settled and gives Verdict; a verify stage takes Proposal"):
        chain(GOOD[0], GOOD[1], Strange(), *GOOD[3:])


def test_needs_that_nobody_provides_are_refused():
    class Blind(HashTarget):
        provides = frozenset({"logits"})

    from dspark.engine import bind

    pipe = chain(GOOD[0], first_of(Lookup(), ScriptedDraft((), taps=(0,))), *GOOD[2:])
    with pytest.raises(BindError, match="FirstOf needs taps, which this target does not provide; it provides logits"):
        bind(pipe, Blind())


def test_a_taken_word_is_refused():
    with pytest.raises(ChainError, match="draft kind 'lookup' is taken"):
        register_draft("lookup")(NoDraft)
    assert KINDS["draft"]["lookup"] is Lookup
