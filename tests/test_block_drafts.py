"""The block drafters on tiny targets of several families: whatever they draft, the text is plain decoding's."""

from __future__ import annotations

import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import attrs
import mlx.core as mx
import numpy as np
import pytest

import dspark.session as session_module
from dspark.checkpoints.drafter import load_drafter
from dspark.engine import bind
from dspark.errors import BindError, DsparkError, InputError
from dspark.models.heads.shapes import parameter_shapes
from dspark.models.target import Target
from dspark.pipeline import chain
from dspark.stages.accept import Greedy, Rejection, SampleMatch
from dspark.stages.draft import DFlash, DFlash2, DSpark, Lookup, NoDraft, first_of
from dspark.stages.draft.block import BlockDraft
from dspark.stages.prefill import Prefill
from dspark.stages.rollback import Checkpoint, rollback_auto
from dspark.stages.verify import Verify
from dspark.stages.warp import temperature, top_p, warps
from tests.fakes import HashTarget
from tests.families import build, quantized
from tests.tiny_drafters import BLOCK, KINDS, head_config, random_drafter, write

STAGES = {"dspark": DSpark, "dflash": DFlash, "dflash2": DFlash2}
# Dense, sliding, sliding with sinks, and two hybrids: short convolutions, gated delta rule.
FAMILIES = ("llama", "gemma3_text", "gpt_oss", "lfm2", "qwen3_5")
PROMPT = (*range(3, 24), 7, 8, 9, 10, 7, 8, 9)
LENGTH = 16
SAMPLED = SampleMatch(warps(temperature(0.8), top_p(0.9)))


@cache
def target(family: str) -> Target:
    changes = {"tie_word_embeddings": False} if family == "llama" else {}
    return Target(build(family, **changes), {"model_type": family}, family)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    """The stage for a random drafter of a kind, on a target of a family."""
    root, made = tmp_path_factory.mktemp("drafters"), {}

    def stage(name, family, **options):
        if (name, family) not in made:
            made[name, family] = random_drafter(root / family / name, name, target(family))
        return STAGES[KINDS[name]["kind"]](made[name, family], **{"bits": 0, **options})

    return stage


def engine(draft, to, accept=None, cap=3, rollback=None):
    return bind(chain(Prefill(chunk=8), draft, Verify(), accept or Greedy(), rollback or rollback_auto(), cap=cap), to)


def run(draft, family, accept=None, length=LENGTH, **options):
    with engine(draft, target(family), accept, **options).open(PROMPT, max_tokens=length, seed=5) as session:
        list(session)
    return session.result


@cache
def plain(family, accept, length=LENGTH):
    return run(NoDraft(), family, accept, length).tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", KINDS)
def test_text_is_plain_decodings(drafter, name, family):
    # Each accept stage meets every kind and every family, in turns.
    accept = SAMPLED if (list(KINDS).index(name) + FAMILIES.index(family)) % 2 else Greedy()
    result = run(drafter(name, family), family, accept)
    assert result.tokens == plain(family, accept)
    assert result.offered_tokens > LENGTH, "it drafted"


@pytest.mark.parametrize("cap", [0, 1, BLOCK, BLOCK + 3])
@pytest.mark.parametrize(("name", "family"), [("vanilla", "lfm2"), ("causal", "gemma3_text"), ("dflash2", "qwen3_5")])
def test_caps_change_no_token(drafter, name, family, cap):
    result = run(drafter(name, family), family, cap=cap)
    assert result.tokens == plain(family, Greedy())
    longest = BLOCK if KINDS[name].get("anchor_predicts", True) else BLOCK - 1
    assert len(result.by_position) == min(cap, longest), "no more than the cap, and no more than the block holds"


@pytest.mark.parametrize("accept", [Greedy(), SAMPLED], ids=["greedy", "sample-match"])
@pytest.mark.parametrize(("name", "family"), [("gated", "llama"), ("dflash", "gpt_oss"), ("dflash2", "lfm2")])
def test_with_lookup_in_front(drafter, name, family, accept):
    hybrid = first_of(Lookup(min_ngram=2, max_ngram=3), drafter(name, family))
    result = run(hybrid, family, accept)
    assert result.tokens == plain(family, accept)
    assert {"lookup", KINDS[name]["kind"]} <= set(result.by_source)


@pytest.mark.parametrize("family", ["lfm2", "gemma3_text"])
def test_where_all_layers_are_fed_again(drafter, family):
    assert run(drafter("rnn", family), family, rollback=Checkpoint()).tokens == plain(family, Greedy())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["gated", "reduced", "dflash2"])
def test_quantised_drafters(drafter, name, bits):
    stage = drafter(name, "llama", bits=bits, group_size=32)
    assert run(stage, "llama").tokens == plain("llama", Greedy())
    head, whole = load_drafter(stage.drafter, bits=bits, group_size=32), load_drafter(stage.drafter, bits=0)
    assert head.layers[0].mlp.up_proj.bits == bits
    packed, stored = head.layers[0].mlp.up_proj, whole.layers[0].mlp.up_proj.weight
    unpacked = mx.dequantize(packed.weight, packed.scales, packed.biases, group_size=32, bits=bits)
    error = mx.abs(unpacked - stored).max()
    # Half a step of 2^bits over the widest group, which normal weights keep below 8 standard deviations of 1.4 / 8.
    assert 0 < error.item() <= 8 * 1.4 / 8 / 2**bits


def test_a_quantised_target_lends_its_tables(drafter, tmp_path):
    for tied in (True, False):
        to = Target(quantized(build("llama", tie_word_embeddings=tied)), {"model_type": "llama"}, "llama-4bit")
        path = random_drafter(tmp_path / str(tied), "vanilla", to)
        results = []
        for draft in (NoDraft(), DSpark(path)):
            with engine(draft, to).open(PROMPT, max_tokens=LENGTH) as session:
                list(session)
            results.append(session.result.tokens)
        assert results[0] == results[1]


# ---- acceptance that is known beforehand -----------------------------------------------------------------------------


def followers(folder, to, pairs, **changes):
    """A DSpark head that knows no more than which token follows which: its Markov table says so, over the noise of a
    random body."""
    config = head_config("vanilla", to, markov_rank=to.vocab_size, **changes)
    rng = np.random.default_rng(0)
    arrays = {k: rng.normal(0, 1 / np.sqrt(s[-1]), s).astype(np.float32) for k, s in parameter_shapes(config).items()}
    table = np.zeros((to.vocab_size, to.vocab_size), np.float32)
    for before, after in pairs:
        table[after, before] = 1e4
    arrays["markov_head.markov_w1.weight"] = np.eye(to.vocab_size, dtype=np.float32)
    arrays["markov_head.markov_w2.weight"] = table
    return write(folder, "vanilla", config, arrays)


@pytest.mark.parametrize("family", FAMILIES)
def test_partial_acceptance_changes_no_token(family, tmp_path):
    text = PROMPT + plain(family, Greedy(), 40)
    stage = DSpark(followers(tmp_path, target(family), pairwise(text)), bits=0)
    for cap in (1, BLOCK):
        result = run(stage, family, length=40, cap=cap)
        assert result.tokens == text[len(PROMPT) :]
        assert 1.2 < result.accepted_length < cap + 1, "some drafts stand, some do not"


def test_a_rollback_of_one_row_too_few_is_caught(tmp_path, monkeypatch):
    text = PROMPT + plain("llama", Greedy(), 40)
    stage, land = DSpark(followers(tmp_path, target("llama"), pairwise(text)), bits=0), session_module.land

    def spoilt(pipeline, buffers, flight, decide):
        settle = buffers.settle
        buffers.settle = lambda keep, fed: settle(tuple(min(n + 1, flight.proposal.tokens.shape[1]) for n in keep), fed)
        try:
            return land(pipeline, buffers, flight, decide)
        finally:
            buffers.settle = settle

    monkeypatch.setattr(session_module, "land", spoilt)
    assert run(stage, "llama", length=40).tokens != text[len(PROMPT) :]


class RuleTarget(HashTarget):
    """The next token is a fixed function of the last one; at one position it is the token behind that instead."""

    name, vocab_size = "rule", 61

    def __init__(self, odd_position: int = -1):
        super().__init__()
        self.odd_position = odd_position

    def __call__(self, ids, caches, target_layer_ids=()):
        start = caches[0].offset
        _, taps = super().__call__(ids, caches, target_layer_ids)
        odd = (start + mx.arange(ids.shape[1]) == self.odd_position).astype(mx.int32)
        following = (ids * 2 + 1 + odd) % self.vocab_size
        return 9.0 * (following[..., None] == mx.arange(self.vocab_size)).astype(mx.float32), taps


def test_a_markov_table_that_holds_the_rule_is_accepted_in_full(tmp_path):
    to, prompt = RuleTarget(odd_position=12), (5, 11, 23, 47)
    rule = [(t, (2 * t + 1) % to.vocab_size) for t in range(to.vocab_size)]
    path = followers(tmp_path, to, rule, embedding="own", lm_head="own", target_layer_ids=(0, 2))
    with engine(DSpark(path, bits=0), to, cap=BLOCK).open(prompt, max_tokens=520) as session:
        accepted = [(commit.rows[0].offered, commit.rows[0].accepted) for commit in session]
    spoilt = next(i for i, (offered, stood) in enumerate(accepted) if stood < offered)
    after = accepted[spoilt + 1 :]
    assert len(session.result.tokens) == 520
    assert sum(stood + 1 for _, stood in after) >= 500
    assert all(offered == stood == BLOCK for offered, stood in after[:-1])


# ---- confidence ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "threshold"), [("vanilla", 0.05), ("gated", 0.5)])
def test_confidence_cuts_and_costs_a_second_read(drafter, name, threshold):
    stage, events = drafter(name, "lfm2", confidence=threshold), []
    made = engine(stage, target("lfm2"), cap=BLOCK)
    assert made.pipeline.draft.reads == 2
    with made.open(PROMPT, max_tokens=LENGTH, sinks=[events.append]) as session:
        list(session)
    assert session.result.tokens == plain("lfm2", Greedy())
    # The last round may have one token to say, for which nothing is drafted.
    assert {event.reads for event in events[:-1]} == {2}
    assert len({event.rows[0].offered for event in events[:-1]}) > 1, "believed in parts"
    assert session.result.by_source.keys() <= {"dspark", "plain"}


@pytest.fixture
def reads(monkeypatch):
    """Every value taken from an array, by the file that takes it."""
    seen = []

    def counted(name):
        read = getattr(mx.array, name)
        return lambda self, *args: seen.append(Path(sys._getframe(1).f_code.co_filename).name) or read(self, *args)

    for name in ("tolist", "item", "__int__", "__float__", "__bool__"):
        monkeypatch.setattr(mx.array, name, counted(name))
    return seen


@pytest.mark.parametrize(
    ("name", "options", "declared"),
    [("vanilla", {}, 1), ("dflash", {}, 1), ("dflash2", {}, 1), ("vanilla", {"confidence": 1e-6}, 2)],
)
def test_reads_are_as_many_as_declared(drafter, reads, name, options, declared):
    made = engine(drafter(name, "llama", **options), target("llama"))
    with made.open(PROMPT) as session:
        session.step()
        reads.clear()
        session.step()
    # A round's one evaluation hands out three small lists; the confidence cut hands out one more before it.
    assert reads == ["round.py"] * (3 + declared - 1)
    assert made.pipeline.draft.reads == declared


def test_a_read_in_a_stage_is_counted(drafter, reads, monkeypatch):
    """The control: a drafter that looks at its own tokens."""
    draft = BlockDraft.__call__

    def peeking(self, settled, carry, cap):
        proposal, carry = draft(self, settled, carry, cap)
        return proposal._replace(offered=(max(1, min(cap, proposal.tokens[0, 0].item())),)), carry

    monkeypatch.setattr(BlockDraft, "__call__", peeking)
    with engine(drafter("vanilla", "llama"), target("llama")).open(PROMPT) as session:
        session.step()
    assert "test_block_drafts.py" in reads


def test_a_threshold_of_nearly_one_drafts_nothing(drafter):
    result = run(drafter("vanilla", "llama", confidence=0.999), "llama")
    assert result.tokens == plain("llama", Greedy())
    assert set(result.by_source) == {"plain"}
    assert result.rounds == LENGTH


def test_confidence_under_rejection_cuts_q_too(drafter):
    accept = Rejection(warps(temperature(0.9)))
    result = run(drafter("vanilla", "llama", confidence=0.5), "llama", accept, cap=BLOCK)
    assert len(result.tokens) == LENGTH
    again = run(drafter("vanilla", "llama", confidence=0.5), "llama", accept, cap=BLOCK)
    assert again.tokens == result.tokens


# ---- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "family"), [("vanilla", "llama"), ("causal", "lfm2"), ("dflash2", "llama")])
def test_rows_of_a_batch_say_what_they_say_alone(drafter, name, family):
    prompts = [PROMPT, PROMPT[:5], PROMPT[2:19], (4,)]
    for draft in (drafter(name, family), first_of(Lookup(min_ngram=2, max_ngram=3), drafter(name, family))):
        made = engine(draft, target(family))
        with made.open(prompts, max_tokens=[20, 9, 20, 14]) as session:
            list(session)
        for prompt, result in zip(prompts, session.results, strict=True):
            with engine(NoDraft(), target(family)).open(prompt, max_tokens=len(result.tokens)) as alone:
                list(alone)
            assert result.tokens == alone.result.tokens


def test_a_hybrid_batch_is_cut_by_confidence(drafter):
    draft = first_of(Lookup(min_ngram=2, max_ngram=3), drafter("vanilla", "llama", confidence=0.999))
    prompts, events = [PROMPT, PROMPT[:9]], []
    with engine(draft, target("llama")).open(prompts, max_tokens=12, sinks=[events.append]) as session:
        list(session)
    rows = [row for event in events for row in event.rows]
    assert {row.source for row in rows} == {"lookup", "plain"}
    assert all(row.offered for row in rows if row.source == "lookup" and row.finish is None)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_bad_options_are_refused():
    for options, words in (
        ({"window": -1}, "window is -1; it must be at least 0"),
        ({"confidence": 1.0}, "confidence is 1.0; it must be at least 0 and below 1"),
    ):
        with pytest.raises(InputError, match=words):
            DSpark("x/y", **options)


def test_what_does_not_fit_is_refused(drafter):
    kind = "holds a dflash drafter and the recipe asks for kind 'dspark'; write kind = 'dflash'"
    with pytest.raises(BindError, match=kind):
        engine(DSpark(drafter("dflash", "llama").drafter), target("llama"))
    with pytest.raises(BindError, match=r"has no confidence head; drop draft\.confidence"):
        engine(drafter("rnn", "llama", confidence=0.5), target("llama"))
    with pytest.raises(BindError, match="has no weights yet; bind the pipeline"):
        drafter("rnn", "llama").init(None)


def test_a_projection_that_is_not_the_targets_is_not_lent(drafter, monkeypatch):
    monkeypatch.setattr(Target, "lm_head_raw", property(lambda self: self.embedding))
    engine(drafter("vanilla", "lfm2"), target("lfm2"))
    with pytest.raises(BindError, match="the vocabulary projection found in llama is not what its logits come from"):
        engine(drafter("vanilla", "llama"), target("llama"))


def test_a_context_that_lags_behind_is_noticed(drafter, monkeypatch):
    """A hybrid that forgets to tell the branch that did not draft."""

    def forgetful(self, settled, carry, cap):
        proposal, first = self.branches[0](settled._replace(taps=None), carry[0], cap)
        if any(proposal.offered):
            return proposal, (first, carry[1])
        proposal, second = self.branches[1](settled, carry[1], cap)
        return proposal, (first, second)

    hybrid = first_of(Lookup(min_ngram=2, max_ngram=3), drafter("vanilla", "llama"))
    monkeypatch.setattr(type(hybrid), "__call__", forgetful)
    with pytest.raises(DsparkError, match="was not told of all tokens: its context ends at"):
        run(hybrid, "llama")


def test_options_round_trip_through_bind(drafter):
    stage = drafter("vanilla", "llama")
    hybrid = first_of(Lookup(), stage)
    bound = hybrid.bind(target("llama"))
    assert bound.written == hybrid
    assert attrs.evolve(bound.branches[1].options) == stage
    assert bound.details[0].startswith("DeepSpec (qwen3), block of 5, 5 drafts, taps of layers 0, 2")
