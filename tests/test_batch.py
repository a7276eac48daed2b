"""Several prompts in one session: each row says what it says alone, and ends, fails and draws for itself."""

import attrs
import mlx.core as mx
import pytest

from dspark.caps import FixedCap, ParkCap
from dspark.engine import bind
from dspark.errors import InputError
from dspark.pipeline import chain
from dspark.session import SessionOptions
from dspark.stages.accept import Greedy, Sampling
from dspark.stages.draft import Lookup, NoDraft, first_of
from dspark.stages.prefill import Prefill
from dspark.stages.rollback import Checkpoint, KvTrim
from dspark.stages.verify import Verify
from dspark.stages.warp import warps
from dspark.stages.warp.base import AbstractWarp
from tests.fakes import VOCAB, HashTarget, ScriptedDraft, plain

PROMPTS = [
    (3, 1, 4, 1, 5),
    (9, 2),
    (6, 5, 3, 5, 8, 9, 7, 9, 3),
    (2,),
    (7, 1, 8, 2, 8),
    (1, 8, 2, 8, 4, 5),
    (9,),
    (5, 5, 5),
]
LENGTH = 30


@pytest.fixture(scope="module")
def truths():
    return [p + tuple(plain(HashTarget(), p, LENGTH + 20)) for p in PROMPTS]


def drafts(truths):
    return {
        "none": NoDraft(),
        "lookup": Lookup(min_ngram=1, max_ngram=2),
        "scripted": ScriptedDraft(tuple(truths), 0.6),
        "hybrid": first_of(Lookup(min_ngram=1, max_ngram=2), ScriptedDraft(tuple(truths), 0.6)),
        "tapped": ScriptedDraft(tuple(truths), 0.6, taps=(0, 2)),
    }


def engine(draft, rollback=None, cap=4, target=None):
    return bind(
        chain(Prefill(chunk=3), draft, Verify(), Greedy(), rollback or KvTrim(), cap=cap), target or HashTarget()
    )


@pytest.mark.parametrize("rollback", [KvTrim(), Checkpoint()])
@pytest.mark.parametrize("batch", [2, 4, 8])
@pytest.mark.parametrize("draft", ["none", "lookup", "scripted", "hybrid", "tapped"])
def test_rows_say_in_a_batch_what_they_say_alone(truths, draft, batch, rollback):
    session = engine(drafts(truths)[draft], rollback).open(PROMPTS[:batch], max_tokens=LENGTH)
    list(session)
    for prompt, truth, result in zip(PROMPTS, truths, session.results, strict=False):
        assert result.tokens == truth[len(prompt) :][:LENGTH]


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_waiting_rows_are_admitted_as_others_end(truths, at_once):
    limits = [5, 20, 1, 9, 0, 13, 7, 2]
    session = engine(drafts(truths)["hybrid"]).open(PROMPTS, max_tokens=limits, options=SessionOptions(batch=at_once))
    commits = list(session)
    assert max(len(commit.rows) for commit in commits) <= at_once
    for prompt, truth, limit, result in zip(PROMPTS, truths, limits, session.results, strict=True):
        assert result.tokens == truth[len(prompt) :][:limit]
        assert result.finish == "length"


def test_rows_of_a_commit_know_their_prompt(truths):
    session = engine(drafts(truths)["scripted"]).open(PROMPTS[:3], max_tokens=[4, 9, 6])
    said = {0: (), 1: (), 2: ()}
    for commit in session:
        for row in commit.rows:
            said[row.index] += row.tokens
    assert [said[i] for i in range(3)] == [r.tokens for r in session.results]


def test_plain_rows_are_sent_ahead_and_parked_ones_too(truths):
    cap = ParkCap(FixedCap(3), probe_every=4, patience=1)
    for draft in (NoDraft(), ScriptedDraft(tuple(truths), 0.0)):
        session = engine(draft, cap=cap).open(PROMPTS[:3], max_tokens=[6, 11, 17])
        list(session)
        for prompt, truth, result in zip(PROMPTS, truths, session.results, strict=False):
            assert result.tokens == truth[len(prompt) :][: len(result.tokens)]
        assert [r.generated_tokens for r in session.results] == [6, 11, 17]


def sampled(prompts, draft, **options):
    session = engine(draft).open(prompts, max_tokens=12, **options)
    list(session)
    return [r.tokens for r in session.results]


def test_seeds_do_not_leak_between_rows():
    warm = Sampling(temperature=1.0)
    together = sampled(PROMPTS[:4], Lookup(min_ngram=1), sampling=warm, seed=[5, 6, 5, 7])
    alone = [
        sampled([p], Lookup(min_ngram=1), sampling=warm, seed=[s])[0]
        for p, s in zip(PROMPTS, (5, 6, 5, 7), strict=False)
    ]
    assert together == alone
    same = sampled([PROMPTS[0]] * 3, Lookup(min_ngram=1), sampling=warm, seed=5)
    assert same[0] == alone[0]
    assert len(set(same)) == 3, "prompts that share a seed draw for themselves"
    assert sampled([PROMPTS[0]] * 2, Lookup(min_ngram=1), sampling=warm, seed=[5, 5])[0] == alone[0]


def test_options_are_a_rows_own(truths):
    options = [Sampling(), Sampling(temperature=1.0), Sampling(repetition_penalty=1.5), Sampling()]
    together = sampled(PROMPTS[:4], drafts(truths)["lookup"], sampling=options, seed=[1, 2, 3, 4])
    alone = [
        sampled([p], drafts(truths)["lookup"], sampling=[s], seed=[i + 1])[0]
        for i, (p, s) in enumerate(zip(PROMPTS, options, strict=False))
    ]
    assert together == alone
    assert together[0] == truths[0][len(PROMPTS[0]) :][:12]
    assert together[2] != truths[2][len(PROMPTS[2]) :][:12]


class Letters:
    """A letter a token, so that stop strings can be tried on any script of tokens."""

    eos_token_ids = ()
    chat_template = None
    has_chat_template = False

    @property
    def detokenizer(self):
        letters = Letters()
        letters.last_segment = ""
        return letters

    def add_token(self, token):
        self.last_segment = chr(ord("A") + token)

    def finalize(self):
        self.last_segment = ""


def stopped(stop, prompts=PROMPTS[:3], limit=LENGTH):
    pipe = bind(chain(Prefill(), NoDraft(), Verify(), Greedy(), KvTrim(), cap=0), HashTarget(), Letters())
    session = pipe.open(list(prompts), max_tokens=limit, stop=stop)
    list(session)
    return [(r.text, r.finish) for r in session.results]


def test_stops_are_for_all_rows_or_a_rows_own():
    texts = [text for text, _ in stopped(())]
    first, second = texts[0][5:7], texts[1][9:11]
    cut = lambda text, *stops: text[: min([text.find(s) for s in stops if s in text], default=None)]
    for_all = stopped([first, second])
    assert [text for text, _ in for_all] == [cut(text, first, second) for text in texts]
    assert stopped((first, second)) == for_all
    own = stopped([[first], [second], []])
    assert own == [(cut(texts[0], first), "stop"), (cut(texts[1], second), "stop"), (texts[2], "length")]
    assert stopped(first) == stopped([[first]] * 3)


def test_strings_are_never_taken_for_one_a_prompt():
    """As many strings as prompts: each of them ends every row, which one a row would not."""
    texts = [text for text, _ in stopped(())]
    last = [text[-2:] for text in texts]
    crossed = [last[1], texts[0][3:5], last[0]]
    assert stopped(crossed)[0] == (texts[0][: texts[0].find(crossed[1])], "stop")
    assert stopped([[s] for s in crossed])[0][1] == "length"


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ([["a"], ["b"]], "stop has 2 entries for 3 prompts"),
        (["a", ["b"], "c"], "stop mixes strings and lists"),
        ([["a"], [""], []], "stop holds an empty string"),
        ([["a"], [7], []], "stop holds 7, which is no text"),
    ],
)
def test_stops_that_make_no_sense(stop, said):
    with pytest.raises(InputError, match=said):
        stopped(stop)


@attrs.frozen
class Fails(AbstractWarp):
    """Raises from the third call on."""

    reorders = True
    calls: list = attrs.field(factory=list, eq=False)

    def __call__(self, logits, context):
        self.calls.append(1)
        if len(self.calls) > 3:
            raise RuntimeError("this warp broke")
        return logits


def test_a_row_whose_warp_raises_ends_alone(truths):
    pipe = engine(drafts(truths)["lookup"])
    session = pipe.open(PROMPTS[:3], max_tokens=LENGTH)
    broken = Greedy(warp=warps(Fails()))
    session._waiting[1].request = attrs.evolve(session._waiting[1].request, accept=broken)
    list(session)
    first, second, third = session.results
    assert (second.finish, second.error) == ("error", "this warp broke")
    assert 0 < second.generated_tokens < LENGTH
    assert second.tokens == truths[1][len(PROMPTS[1]) :][: second.generated_tokens]
    for i, result in ((0, first), (2, third)):
        assert result.tokens == truths[i][len(PROMPTS[i]) :][:LENGTH]


class FailsOnPrompt(HashTarget):
    def __call__(self, ids, caches, target_layer_ids=()):
        if ids.shape == (1, 1) and caches[0].offset == 0 and ids.item() == PROMPTS[1][0]:
            raise RuntimeError("no such prompt")
        return super().__call__(ids, caches, target_layer_ids)


def test_a_prompt_that_cannot_be_prefilled_ends_alone(truths):
    session = engine(drafts(truths)["lookup"], target=FailsOnPrompt()).open(PROMPTS[:3], max_tokens=8)
    list(session)
    assert [r.finish for r in session.results] == ["length", "error", "length"]
    assert session.results[1].error == "no such prompt"


def test_cancel_ends_every_row(truths):
    session = engine(drafts(truths)["scripted"]).open(PROMPTS[:4], max_tokens=LENGTH, options=SessionOptions(batch=2))
    session.step()
    session.cancel()
    last = list(session)[-1]
    assert [row.finish for row in last.rows] == ["cancelled"] * 4
    assert [r.finish for r in session.results] == ["cancelled"] * 4


@pytest.mark.parametrize("options", [{"max_tokens": [1]}, {"seed": [1]}, {"sampling": [Sampling()] * 3}])
def test_lists_must_be_as_long_as_the_prompts(truths, options):
    with pytest.raises(InputError, match="for 2 prompts"):
        engine(NoDraft()).open(PROMPTS[:2], **options)


def test_a_batch_that_mixes_up_its_rows_is_caught(truths, monkeypatch):
    import dspark.session as module

    def crossed(pipeline, state, other, epoch):
        joined = right(pipeline, state, other, epoch)
        swapped = mx.concatenate([joined.settled.anchor[1:], joined.settled.anchor[:1]])
        return joined._replace(settled=joined.settled._replace(anchor=swapped))

    right = module.join_rows
    monkeypatch.setattr(module, "join_rows", crossed)
    session = engine(drafts(truths)["scripted"]).open(PROMPTS[:2], max_tokens=LENGTH)
    list(session)
    assert session.results[0].tokens != truths[0][len(PROMPTS[0]) :][:LENGTH]
    assert max(max(r.tokens) for r in session.results) < VOCAB
