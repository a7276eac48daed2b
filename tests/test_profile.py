"""`dspark bench --profile`: the parts of a round add up to it, none is counted twice, and watching changes nothing."""

import itertools
import json

import pytest

import dspark.bench.profile as profile_module
import dspark.round
import dspark.session
from dspark.bench.measure import Question
from dspark.bench.profile import PARTS, Profile, Round, Watch, middle, profile, watched, whole
from dspark.bench.profile_words import profile_dict, profile_lines, whole_over_parts
from dspark.caps import AdaptiveCap, FixedCap
from dspark.cli import main
from dspark.engine import bind
from dspark.pipeline import chain
from dspark.stages.accept import Greedy
from dspark.stages.prefill import Prefill
from dspark.stages.rollback import Checkpoint, KvTrim
from dspark.stages.verify import Verify
from tests.fakes import HashTarget, ScriptedDraft, plain
from tests.test_cli import assert_one_sentence, tiny_model

PROMPT = (3, 1, 4, 1, 5)
ASKED = (Question("chat", 1, PROMPT), Question("chat", 2, (*PROMPT, 9)))


def engine(cap=None, rollback=None, length=60):
    truths = tuple((*q.ids, *plain(HashTarget(), q.ids, length)) for q in ASKED)
    stages = Prefill(), ScriptedDraft(truths[::-1], 0.7), Verify(), Greedy(), rollback or KvTrim()
    return bind(chain(*stages, cap=cap or FixedCap(3)), HashTarget())


@pytest.mark.parametrize("rollback", [KvTrim(), Checkpoint()])
def test_watching_changes_no_token_and_leaves_nothing_behind(rollback):
    before = dspark.session.send, dspark.session.land, dspark.round.read
    rounds = watched(engine(rollback=rollback), PROMPT, 40)
    assert sum(r.tokens for r in rounds) == 40 - len(first_commit(rollback))
    assert (dspark.session.send, dspark.session.land, dspark.round.read) == before
    with engine(rollback=rollback).open(PROMPT, max_tokens=40) as session:
        list(session)
    assert session.result.tokens == tuple(plain(HashTarget(), PROMPT, 40))


def first_commit(rollback):
    with engine(rollback=rollback).open(PROMPT, max_tokens=40) as session:
        return session.step().tokens


def test_names_are_given_back_when_a_round_fails():
    before = dspark.session.send, dspark.session.land, dspark.round.read
    bound = engine()
    with bound.open(PROMPT, max_tokens=9) as session, pytest.raises(RuntimeError), Watch().on(session):
        raise RuntimeError
    assert (dspark.session.send, dspark.session.land, dspark.round.read) == before
    assert "_cap" not in vars(session)


def test_every_part_of_a_drafted_round_is_seen_and_every_other_round_runs_apart():
    rounds = watched(engine(), PROMPT, 40)
    assert all(set(r.parts) >= set(PARTS) - {"cap"} for r in rounds)
    assert all(seconds >= 0 for r in rounds for seconds in r.parts.values())
    assert [r.apart for r in rounds] == [i % 2 == 1 and r.offered > 0 for i, r in enumerate(rounds)]
    assert max(r.width for r in rounds) == 4


def test_a_part_inside_another_is_counted_once(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(profile_module, "perf_counter", lambda: next(ticks))
    watch = Watch()
    inner = watch.timed("read", lambda: None)
    watch.timed("driver", lambda: [inner(), inner()])()
    # The clock is asked six times: five ticks pass, of which each inner call has one.
    assert watch.seconds == {"read": 2, "driver": 3}


def test_means_of_the_middle_half_add_up_where_medians_would_not():
    """Every other read waits for nothing: the median of each part misses most of the time."""
    rounds = [
        Round(1, 0, 1, False, {"dispatch": 9.0 * (i % 2), "read": 9.0 * (1 - i % 2), "draft": 1.0}) for i in range(8)
    ]
    rounds += [Round(1, 0, 1, False, {"read": 500.0}), Round(1, 0, 1, False, {"read": 0.0})]
    found = middle(rounds)
    assert sum(found.values()) == pytest.approx(10.0) == whole(rounds)
    assert middle([]) == {}
    assert whole([]) is None


def test_recipe_and_target_are_answered_in_turn():
    told = []
    found = profile(engine(), ASKED, 20, told.append)
    assert told[2:] == ["chat 1, recipe", "chat 1, plain", "chat 2, plain", "chat 2, recipe"]
    assert found.drafted
    assert all(r.width == 1 and not r.offered for r in found.plain)
    assert len(found.plain) == 2 * 19


def test_parked_rounds_stand_apart():
    found = profile(engine(cap=AdaptiveCap()), ASKED, 30, lambda text: None)
    assert found.parked
    assert all("cap" in r.parts for r in found.parked)


def test_the_whole_is_compared_with_its_parts():
    flowing = [Round(4, 3, 2, False, {"dispatch": 2.0, "read": 8.0})]
    apart = [Round(4, 3, 2, True, {"draft": 3.0, "verify": 5.0})]
    assert whole_over_parts(flowing, apart) == 1.25
    lines = profile_lines(Profile((*flowing, *apart), (), ()))
    assert any("takes 1.25 times the sum of its parts" in line for line in lines)
    assert not any("takes" in line for line in profile_lines(Profile(tuple(flowing), (), ())))
    assert profile_dict(Profile((*flowing, *apart), (), ()))["widths"][0]["whole_over_parts"] == 1.25


def test_the_command_prints_parts_and_writes_them(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    asked, out = tmp_path / "mine.toml", tmp_path / "profile.json"
    asked.write_text("prompts = ['to be, to be, to be']")
    tiny_model(tmp_path)
    options = (
        "--target",
        str(tmp_path),
        "--profile",
        "--prompts",
        str(asked),
        "--max-tokens",
        "9",
        "--cap",
        "3",
        "--quiet",
    )
    assert main(["bench", "lookup", *options, "--json", str(out)]) == 0
    said, err = capfd.readouterr()
    assert err == ""
    assert "machine " in said
    assert "steps of the target alone" in said
    assert all(part in said for part in PARTS)
    written = json.loads(out.read_text())["profile"]
    assert written["plain"]["whole_ms"] > 0
    assert set(written["plain"]["parts_ms"]) == set(PARTS)
    assert len(written["rounds"]["plain"]) == 8


def test_a_profile_compares_with_nobody(capsys):
    assert main(["bench", "lookup", "--profile", "--against", "mlx-lm"]) == 2
    err = capsys.readouterr().err
    assert_one_sentence(err)
    assert "drop --against" in err
