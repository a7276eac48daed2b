"""Where recipes are: names, files, the hub; what paths in them start from; what loading one costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dspark import recipe as recipes
from dspark.errors import InputError, RecipeError, SourceError
from tests.recipe_texts import minimal


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
        ("mine.toml/x", "no such recipe or file; `dspark recipes` lists those that are shipped"),
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
