"""What a user reads when something is wrong, word for word."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from dspark import errors
from dspark import recipe as recipes
from dspark.errors import RecipeError, SourceError
from dspark.stages.draft import NoDraft
from dspark.stages.registry import KINDS

HERE = Path(__file__).parent
# Kinds that come later lengthen the lists of what is allowed.
DRAFTS = "{drafts}"

BROKEN = """\
broken.toml: descripton: unknown key; allowed: schema, name, description, target, prefill, draft, accept, sampling, \
rollback, cap, chat, kernels; did you mean 'description'?
broken.toml: cap: got -1; a cap is at least 0
broken.toml: target.revision: expected a string, got 7; write it in quotes
broken.toml: target.dtype: 'float61' is not a choice; allowed: float32, float16, bfloat16, stored; did you mean 'float16'?
broken.toml: prefill.chunk: expected an integer, got 2.7
broken.toml: draft.branches[0].max_ngram: max_ngram is 5; it must not be below min_ngram, which is 9
broken.toml: draft.branches[0].longest: expected an integer, got true
broken.toml: draft.branches[1].kind: unknown stage 'lookpu'; allowed: {drafts}; did you mean 'lookup'?
broken.toml: sampling.top_p: got 7; it must be a number from 0 to 1
broken.toml: sampling.temprature: unknown key; allowed: temperature, top_p, top_k, min_p, logit_bias, repetition_penalty, \
repetition_context, presence_penalty, frequency_penalty, logprobs, top_logprobs, seed; did you mean 'temperature'?"""


def golden(text: str) -> str:
    return text.replace(DRAFTS, ", ".join(sorted(KINDS["draft"])))


def test_ten_faults_are_named_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE / "data")
    with pytest.raises(RecipeError) as caught:
        recipes.load("broken.toml")
    assert str(caught.value) == golden(BROKEN)
    assert len(caught.value.problems) == 10


def test_the_ten_faults_are_the_only_ones() -> None:
    """Negative control: with its faults mended the same file loads."""
    text = (HERE / "data" / "broken.toml").read_text()
    for wrong, right in {
        "descripton": "description",
        "cap = -1": "cap = 1",
        "revision = 7": "revision = 'x'",
        "float61": "float16",
        "2.7": "27",
        "min_ngram = 9": "min_ngram = 3",
        "longest = true": "longest = 9",
        "lookpu": "lookup",
        "top_p = 7": "top_p = 0.7",
        "temprature": "temperature",
    }.items():
        assert text.count(wrong) == 1
        text = text.replace(wrong, right)
    recipes.loads(text)


@pytest.mark.parametrize("mended", ["cap = 1", "chunk = 27"])
def test_a_mended_fault_is_no_longer_named(mended: str) -> None:
    key, _, value = mended.partition(" = ")
    path = {"chunk": "prefill.chunk"}.get(key, key)
    with pytest.raises(RecipeError) as caught:
        recipes.load(HERE / "data" / "broken.toml", [f"{path}={value}"])
    assert len(caught.value.problems) == 9
    assert not any(p.startswith(f"{path}:") for p in caught.value.problems)


def test_a_misspelt_stage_in_a_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS["draft"], "dspark", NoDraft)
    text = "schema = 1\n[draft]\nkind = 'hybrid'\nbranches = [{kind = 'lookup'}, {kind = 'dspork'}]"
    with pytest.raises(RecipeError) as caught:
        recipes.loads(text, "recipes/chat.toml")
    assert str(caught.value) == golden(
        "recipes/chat.toml: draft.branches[1].kind: unknown stage 'dspork'; allowed: {drafts}; did you mean 'dspark'?"
    )


def test_a_misspelt_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dspark.recipe.find.shipped", lambda: [("lookup", Path("lookup.toml")), ("plain", Path("plain.toml"))]
    )
    with pytest.raises(SourceError) as caught:
        recipes.load("recipes/lokup.toml")
    assert str(caught.value) == (
        "recipes/lokup.toml: no such recipe or file; `dspark recipes` lists those that are shipped; did you mean 'lookup'?"
    )


def test_broken_toml() -> None:
    with pytest.raises(RecipeError) as caught:
        recipes.loads("schema = 1\n[draft\nkind = 'none'", "mine.toml")
    assert (
        str(caught.value)
        == "mine.toml: line 2, column 7: not valid TOML: Expected ']' at the end of a table declaration"
    )


def test_settings() -> None:
    with pytest.raises(RecipeError) as caught:
        recipes.loads("schema = 1\ndraft.kind = 'lookup'", "mine.toml", ["draft.min_ngrm=5", "draft.base=x", "cap"])
    assert str(caught.value).splitlines() == [
        "mine.toml: --set cap: expected KEY=VALUE, as in --set draft.min_ngram=5",
        "mine.toml: --set draft.min_ngrm: unknown key; allowed: kind, min_ngram, max_ngram, base, longest, probe_every; "
        "did you mean 'min_ngram'?",
        "mine.toml: --set draft.base: expected an integer, got 'x'",
    ]


def test_exit_codes() -> None:
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Exception)]
    assert len(classes) > 8
    for cls in classes:
        assert issubclass(cls, errors.DsparkError)
        assert cls.exit_code == (2 if issubclass(cls, errors.UserError) else 1)
    assert errors.RecipeError.exit_code == errors.SourceError.exit_code == errors.InputError.exit_code == 2
    assert errors.PoisonedBuffers.exit_code == 1
