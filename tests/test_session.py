"""How an answer ends, what is shown of it, and what a session survives."""

import threading

import mlx.core as mx
import pytest

from dspark.engine import bind
from dspark.errors import DsparkError, InputError, PoisonedBuffers, StaleState
from dspark.pipeline import chain
from dspark.session import SessionOptions
from dspark.stages.accept import Greedy
from dspark.stages.draft import Lookup, NoDraft
from dspark.stages.prefill import Prefill
from dspark.stages.rollback import Checkpoint, KvTrim
from dspark.stages.verify import Verify
from dspark.transcript import Transcript
from tests.fakes import STOP, HashTarget, ScriptedDraft, ScriptTarget, byte_tokenizer, plain

PROMPT = (10, 11, 12)
FAMILY = "👩‍👩‍👧‍👦 příliš žluťoučký 日本 !"


def engine_for(text, cap=8, rollback=None, rate=1.0, draft=None):
    """An engine whose target answers `text` and then the stop token, with perfect or spoiled drafts of it."""
    said = [*text.encode(), STOP, *b" never shown, never counted"]
    script = [0] * (len(PROMPT) - 1) + said + [0] * 40
    draft = draft or ScriptedDraft((tuple(PROMPT) + tuple(said) + (0,) * 40,), rate, vocab=256)
    pipe = chain(Prefill(), draft, Verify(), Greedy(), rollback or KvTrim(), cap=cap)
    return bind(pipe, ScriptTarget(script), byte_tokenizer())


@pytest.mark.parametrize("cap", [0, 1, 3, 8])
@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_a_stop_token_inside_a_block_ends_the_answer_there(cap, rate):
    with engine_for("hello", cap, rate=rate).open(PROMPT, max_tokens=100) as session:
        streamed = "".join(commit.text for commit in session)
    result = session.result
    assert (streamed, result.text, result.finish) == ("hello", "hello", "stop")
    assert result.tokens == (*b"hello", STOP)
    assert session._buffers.held == (len(PROMPT) + len(b"hello"),)


@pytest.mark.parametrize("rollback", [KvTrim(), Checkpoint()])
@pytest.mark.parametrize("limit", range(10))
@pytest.mark.parametrize("cap", [0, 1, 4, 8])
def test_max_tokens_is_exact(cap, limit, rollback):
    with engine_for("0123456789", cap, rollback).open(PROMPT, max_tokens=limit) as session:
        commits = list(session)
    assert sum(len(c.tokens) for c in commits) == limit == session.result.generated_tokens
    assert session.result.text == "0123456789"[:limit]
    assert session.result.finish == "length"
    assert session._buffers is None or session._buffers.held == (len(PROMPT) + max(limit - 1, 0),)


def test_max_tokens_zero_does_not_touch_the_target():
    engine = engine_for("abc")
    assert list(engine.open(PROMPT, max_tokens=0)) == []
    assert engine.target.forwards == 0


@pytest.mark.parametrize("cap", range(9))
def test_characters_of_several_tokens_come_out_whole(cap):
    with engine_for(FAMILY, cap).open(PROMPT, max_tokens=200) as session:
        pieces = [commit.text for commit in session]
    assert "".join(pieces) == FAMILY == session.result.text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("limit", range(1, 30))
def test_a_character_cut_by_max_tokens_is_shown_as_the_whole_text_has_it(limit):
    with engine_for(FAMILY).open(PROMPT, max_tokens=limit) as session:
        streamed = "".join(commit.text for commit in session)
    assert streamed == FAMILY.encode()[:limit].decode("utf-8", "replace")


@pytest.mark.parametrize("cap", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    ("stop", "shown"), [("end", "the "), ("e end", "th"), ("🙂", "the end 🙃"), ("zzz", "the end 🙃🙂.")]
)
def test_a_stop_string_is_never_shown_even_in_part(cap, stop, shown):
    with engine_for("the end 🙃🙂.", cap).open(PROMPT, max_tokens=100, stop=stop) as session:
        pieces = [commit.text for commit in session]
    assert "".join(pieces) == shown == session.result.text
    assert session.result.finish == "stop"
    for i in range(len(pieces)):
        assert shown.startswith("".join(pieces[:i]))


def test_tokens_behind_a_stop_string_are_not_counted_or_cached():
    with engine_for("abcdefgh", 8).open(PROMPT, max_tokens=100, stop="cd") as session:
        list(session)
    assert session.result.tokens == tuple(b"abcd")
    assert session._buffers.held == (len(PROMPT) + 3,)


def test_the_first_of_several_stop_strings_wins():
    with engine_for("one two three").open(PROMPT, stop=("three", "two")) as session:
        list(session)
    assert session.result.text == "one "


def test_text_held_back_for_a_stop_string_that_does_not_come_is_shown_at_the_end():
    with engine_for("ab<en").open(PROMPT, stop="<end>") as session:
        list(session)
    assert session.result.text == "ab<en"


def test_a_transcript_without_hold_back_would_leak_a_stop_string():
    leaky = Transcript(byte_tokenizer().detokenizer, (), ("end",), 99)
    leaky._stops = ()
    assert leaky.feed(list(b"the en"))[1] == "the en"
    assert Transcript(byte_tokenizer().detokenizer, (), ("end",), 99).feed(list(b"the en"))[1] == "the "


def test_counts_add_up():
    with engine_for("count these tokens please", 5, rate=0.6).open(PROMPT) as session:
        commits = list(session)
    result = session.result
    assert sum(sum(row.from_draft) for c in commits for row in c.rows) == result.accepted_tokens
    assert result.accepted_tokens <= result.offered_tokens
    assert sum(accepted for _, accepted in result.by_position) == result.accepted_tokens
    assert sum(result.by_source.values()) == result.rounds == len(commits)
    assert result.generated_tokens <= result.rounds + result.accepted_tokens


# ---- cancelling, errors, states ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rollback", [KvTrim(), Checkpoint()])
@pytest.mark.parametrize("cap", [0, 4])
def test_cancel_keeps_the_text_and_the_buffers(rollback, cap):
    truth = PROMPT + tuple(plain(HashTarget(), PROMPT, 60))
    pipe = chain(Prefill(), ScriptedDraft((truth,), 0.5), Verify(), Greedy(), rollback, cap=cap)
    engine = bind(pipe, HashTarget())
    session = engine.open(PROMPT, max_tokens=60)
    for _ in range(4):
        session.step()
    said = session.result.tokens
    threading.Thread(target=session.cancel).start()
    while (commit := session.step()) is not None:
        last = commit
    assert last.finish == "cancelled" == session.result.finish
    assert session.result.tokens[: len(said)] == said
    more = PROMPT + session.result.tokens
    again = engine.open(more, max_tokens=20, options=SessionOptions(reuse=session))
    list(again)
    assert again.result.cached_tokens == len(more) - 1
    assert again.result.tokens == truth[len(more) :][:20]


def test_cancel_in_prefill():
    engine = engine_for("never")
    session = None

    def progress(done, total):
        session.cancel()

    long = tuple(range(1, 101))
    pipe = chain(Prefill(chunk=10), NoDraft(), Verify(), Greedy(), KvTrim())
    engine = bind(pipe, HashTarget())
    session = engine.open(long, options=SessionOptions(progress=progress))
    assert [c.finish for c in session] == ["cancelled"]
    assert engine.target.forwards == 1


class Faulty(HashTarget):
    """Fails in the forwards named."""

    def __init__(self, bad):
        super().__init__()
        self.bad = bad

    def __call__(self, ids, caches, target_layer_ids=()):
        out = super().__call__(ids, caches, target_layer_ids)
        if self.forwards in self.bad:
            raise RuntimeError("the device went away")
        return out


@pytest.mark.parametrize("rollback", [KvTrim(), Checkpoint()])
@pytest.mark.parametrize(("rate", "cap"), [(0.5, 4), (1.0, 4), (0.0, 0)])
def test_an_error_in_a_round_restores_it(rollback, rate, cap):
    truth = PROMPT + tuple(plain(HashTarget(), PROMPT, 60))
    pipe = chain(Prefill(), ScriptedDraft((truth,), rate), Verify(), Greedy(), rollback, cap=cap)
    session = bind(pipe, Faulty({3, 6})).open(PROMPT, max_tokens=40)
    failures = 0
    while session.result.finish is None:
        try:
            session.step()
        except RuntimeError:
            failures += 1
    assert failures == 2
    assert session.result.tokens == truth[len(PROMPT) :][:40]


def test_a_prefill_that_failed_may_be_tried_again():
    session = bind(chain(Prefill(), Lookup(), Verify(), Greedy(), KvTrim()), Faulty({1})).open(PROMPT, max_tokens=9)
    with pytest.raises(RuntimeError):
        session.step()
    list(session)
    assert session.result.tokens == tuple(plain(HashTarget(), PROMPT, 9))


def test_an_error_that_cannot_be_undone_poisons_the_buffers(monkeypatch):
    session = bind(chain(Prefill(), Lookup(), Verify(), Greedy(), KvTrim()), Faulty({2})).open(PROMPT)
    assert session.state.epoch == session._buffers.epoch

    def broken():
        raise RuntimeError("no way back")

    monkeypatch.setattr(session._buffers, "restore", broken)
    with pytest.raises(RuntimeError, match="went away"):
        session.step()
    with pytest.raises(PoisonedBuffers, match=r"went away.*no way back"):
        session.step()


def test_a_state_can_be_used_once():
    session = bind(chain(Prefill(), Lookup(), Verify(), Greedy(), KvTrim()), HashTarget()).open(PROMPT)
    first = session.state
    _, second = session.round(first)
    with pytest.raises(StaleState, match="fork"):
        session.round(first)
    session.round(second)


@pytest.mark.parametrize("rollback", [KvTrim(), Checkpoint()])
def test_a_fork_goes_on_by_itself(rollback):
    truth = PROMPT + tuple(plain(HashTarget(), PROMPT, 60))
    pipe = chain(Prefill(), Lookup(min_ngram=1, max_ngram=2), Verify(), Greedy(), rollback)
    session = bind(pipe, HashTarget()).open(PROMPT, max_tokens=50)
    for _ in range(5):
        session.step()
    twin = session.fork()
    list(twin)
    assert session.result.generated_tokens < 50
    list(session)
    assert session.result.tokens == twin.result.tokens == truth[len(PROMPT) :][:50]


def test_a_second_turn_goes_on_from_the_first_ones_caches():
    engine = engine_for("hello")
    first = engine.open(PROMPT, max_tokens=50)
    list(first)
    prompt = PROMPT + first.result.tokens + (65, 66)
    second = engine.open(prompt, max_tokens=3, options=SessionOptions(reuse=first))
    list(second)
    assert second.result.cached_tokens == len(PROMPT) + len(b"hello")
    with pytest.raises(DsparkError):
        _ = first.state


def test_a_second_prompt_that_differs_keeps_what_is_shared():
    engine = bind(chain(Prefill(), Lookup(), Verify(), Greedy(), KvTrim()), HashTarget())
    first = engine.open(PROMPT, max_tokens=20)
    list(first)
    prompt = (*PROMPT, *first.result.tokens[:5], 1, 2, 3)
    second = engine.open(prompt, max_tokens=20, options=SessionOptions(reuse=first))
    list(second)
    assert second.result.cached_tokens == len(PROMPT) + 5
    assert second.result.tokens == tuple(plain(HashTarget(), prompt, 20))


def test_sinks_hear_every_round():
    events = []
    with engine_for("some text").open(PROMPT, sinks=[events.append]) as session:
        commits = list(session)
    assert [e.round for e in events] == list(range(1, len(commits) + 1))
    assert [e.rows for e in events] == [c.rows for c in commits]
    assert {e.reads for e in events} == {1}


def test_parked_steps_are_sent_ahead_and_not_counted():
    target = HashTarget()
    pipe = chain(Prefill(), NoDraft(), Verify(), Greedy(), KvTrim())
    session = bind(pipe, target).open(PROMPT, max_tokens=30)
    session.step()
    assert target.forwards == 3, "prefill, the first step, and one sent ahead"
    list(session)
    assert session.result.rounds == 30
    assert session.result.tokens == tuple(plain(HashTarget(), PROMPT, 30))
    assert session._buffers.held == (len(PROMPT) + 29,)


# ---- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "2\\^64 - 1"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"stop": ""}, "stop holds an empty string"),
        ({"stop": ("a", "")}, "stop holds an empty string"),
    ],
)
def test_bad_options_are_refused(options, says):
    with pytest.raises(InputError, match=says):
        engine_for("x").open(PROMPT, **options)


def test_bad_prompts_are_refused():
    engine = engine_for("x")
    with pytest.raises(InputError, match="the prompt is empty"):
        engine.open("")
    with pytest.raises(InputError, match="no tokenizer"):
        bind(chain(Prefill(), Lookup(), Verify(), Greedy(), KvTrim()), HashTarget()).open("text")
    short = bind(chain(Prefill(), Lookup(), Verify(), Greedy(), KvTrim()), HashTarget(), context_length=8)
    with pytest.raises(InputError, match="9 tokens, and the context holds 8"):
        short.open(tuple(range(1, 10)))
    with short.open(tuple(range(1, 7)), max_tokens=50) as session:
        list(session)
    assert session.result.generated_tokens == 2
    assert mx.get_active_memory() >= 0
