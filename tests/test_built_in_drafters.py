"""The drafters that ship for the default model: whole, small enough, of the documented quality, and lossless."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

import dspark
from dspark.checkpoints.drafter import TargetFacts, inspect
from dspark.train.recipe import load_train_recipe

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "recipes" / "smollm2-135m"
KINDS = ("dspark", "dflash", "dflash2")
TARGET = TargetFacts(hidden_size=576, vocab_size=49152, num_layers=30, model_type="llama", name="SmolLM2-135M-Instruct")
MOST_BYTES = 24_000_000
TEXTS = ROOT / "tests" / "data" / "smollm2_texts.json"
PROMPTS = (
    "Why do leaves turn red in autumn?",
    "Write a Python function that counts the vowels of a word.",
    "A train goes 60 km in 45 minutes. How far does it go in two hours? Think step by step.",
)
LENGTH = 128


@pytest.mark.parametrize("kind", KINDS)
def test_a_shipped_drafter_fits_the_default_model(kind):
    report = inspect(FOLDER / kind, TARGET)
    assert report.refused is None
    assert report.kind == kind
    other = attrs.evolve(TARGET, hidden_size=640)
    assert inspect(FOLDER / kind, other).refused is not None


def test_together_they_are_small_enough_to_ship():
    files = [path for kind in KINDS for path in (FOLDER / kind).iterdir()]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES


@pytest.mark.parametrize("kind", KINDS)
def test_what_made_it_lies_beside_it(kind):
    """The training recipe that made it is the one in recipes/train, and the log ends where the recipe's budget did."""
    recipe, there = load_train_recipe(FOLDER / kind / "train.toml"), ROOT / "recipes" / "train"
    said = load_train_recipe(there / f"smollm2-135m-{kind}.toml")
    assert (recipe.drafter, recipe.optimiser, recipe.target) == (said.drafter, said.optimiser, said.target)
    lines = [json.loads(line) for line in (FOLDER / kind / "log.jsonl").read_text().splitlines()]
    last = [line for line in lines if "evaluation" in line][-1]
    assert last["step"] == max(line["step"] for line in lines)
    assert last["evaluation"]["synthetic"]["full"] > 2


def documented(kind: str) -> float:
    """The accepted length that docs/built-in-drafters.md states for the stored texts."""
    page = (ROOT / "docs" / "built-in-drafters.md").read_text(encoding="utf-8")
    found = re.search(rf"^\| {kind}, as shipped \|.*\| ([\d.]+) \|$", page, re.MULTILINE)
    assert found, f"docs/built-in-drafters.md says nothing of {kind}, as shipped"
    return float(found[1])


def replayed(drafter: Path) -> float:
    """Tokens a round along the stored texts, by the benchmark and with a real BLAS, for the bundled one takes minutes."""
    env = {k: v for k, v in os.environ.items() if k != "DSPARK_BLAS"}
    command = [sys.executable, "-m", "benchmarks.replay", str(drafter), str(TEXTS)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=1500)
    return float(re.search(r"^full block \(\d drafts\) +([\d.]+) tokens", done.stdout, re.MULTILINE)[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_accepts_what_is_documented(kind):
    assert replayed(FOLDER / kind) >= 0.9 * documented(kind)


@pytest.mark.slow
def test_a_damaged_drafter_accepts_less(tmp_path):
    """Negative control: a drafter whose taps were mixed up stays below the bar."""
    import shutil

    shutil.copytree(FOLDER / "dspark", tmp_path / "mixed")
    config = json.loads((tmp_path / "mixed" / "config.json").read_text())
    key = "aux_hidden_state_layer_ids" if "aux_hidden_state_layer_ids" in config else "target_layer_ids"
    config[key] = config[key][::-1]
    (tmp_path / "mixed" / "config.json").write_text(json.dumps(config))
    assert replayed(tmp_path / "mixed") < 0.9 * documented("dspark")


@pytest.fixture(scope="module")
def engine():
    return dspark.load("smollm2-135m").bind(probe=False, calibration="off")


@pytest.fixture(scope="module")
def alone(engine):
    """What plain decoding says."""
    bare = attrs.evolve(engine, pipeline=attrs.evolve(engine.pipeline, draft=dspark.NoDraft()))
    return {prompt: answer(bare, prompt) for prompt in PROMPTS}


def answer(engine, prompt):
    with engine.open(prompt, max_tokens=LENGTH) as session:
        list(session)
    return session.result


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_changes_no_token(kind, engine, alone):
    stage = {"dspark": dspark.DSpark, "dflash": dspark.DFlash, "dflash2": dspark.DFlash2}[kind](str(FOLDER / kind))
    pipe = attrs.evolve(engine.pipeline, draft=stage.bind(engine.target), cap=dspark.FixedCap(3))
    drafted = attrs.evolve(engine, pipeline=pipe)
    for prompt in PROMPTS:
        found = answer(drafted, prompt)
        assert found.tokens == alone[prompt].tokens
        assert found.accepted_length > 1.2
