"""Every example runs, on the fake target, and is short enough to read."""

import importlib.util
from pathlib import Path

import pytest

import dspark
from dspark.engine import bind
from tests.fakes import HashTarget, plain

EXAMPLES = Path(__file__).parent.parent / "examples"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def engine(draft=None, cap=4):
    stages = dspark.Prefill(), draft or dspark.Lookup(min_ngram=1), dspark.Verify(), dspark.Greedy(), dspark.KvTrim()
    return bind(dspark.chain(*stages, cap=cap), HashTarget())


def test_run_recipe(capsys):
    result = example("run_recipe").main(PROMPT, engine(), max_tokens=30)
    assert result.tokens == tuple(plain(HashTarget(), PROMPT, 30))
    assert "tokens a round, ended by length" in capsys.readouterr().out


def test_compose(tmp_path, monkeypatch):
    monkeypatch.setattr(dspark, "bind", bind)
    out = tmp_path / "mine.toml"
    tokens = example("compose").main(HashTarget(), PROMPT, out, max_tokens=20)
    assert len(tokens) == 20
    again = bind(dspark.load(out).pipeline(), HashTarget())
    with again.open(PROMPT, max_tokens=20, seed=7) as session:
        assert [token for commit in session for token in commit.tokens] == tokens


def test_write_drafter():
    bigram = example("write_drafter").Bigram()
    with engine(bigram).open(PROMPT, max_tokens=60) as session:
        list(session)
    assert session.result.tokens == tuple(plain(HashTarget(), PROMPT, 60))
    assert session.result.by_source["bigram"] > 5
    assert dspark.dump is not None
    both = engine(dspark.first_of(dspark.Lookup(min_ngram=2), bigram)).open(PROMPT, max_tokens=60)
    list(both)
    assert both.result.tokens == session.result.tokens


def test_telemetry(capsys):
    rounds = example("telemetry").main(engine(), PROMPT, max_tokens=40)
    assert sum(rounds.values()) > 10
    assert "accepted: #" in capsys.readouterr().out


def test_sampling():
    first, same, other = example("sampling").main(engine(), PROMPT)
    assert first == same != other


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_an_example_is_short_and_tested(path):
    assert len(path.read_text().splitlines()) <= 40
    assert f'example("{path.stem}")' in Path(__file__).read_text()
