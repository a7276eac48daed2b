"""`dspark train` on the command line: what it would take, mistakes in one sentence, and a Ctrl-C that loses nothing."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest

from dspark.cli import main
from dspark.train import command, keep, loop
from tests.tiny_school import tiny_teacher, write_recipe


@pytest.fixture
def train(capfd, monkeypatch):
    """Run `dspark train` with the tiny target: its exit code, standard output and standard error."""
    monkeypatch.setattr(command, "load_teacher", lambda recipe: tiny_teacher())
    monkeypatch.setattr(command, "EVALUATION", ())
    monkeypatch.setattr(loop.Run, "evaluate", lambda self, measure: {})

    def call(*args):
        code = main(["train", *map(str, args)])
        out, err = capfd.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return call


def mistake(said):
    """The sentence of a user's mistake, which is all there is."""
    assert said.code == 2
    assert said.out == ""
    (line,) = said.err.strip().splitlines()
    assert "Traceback" not in line
    return line


def test_a_dry_run_says_what_it_would_take(train, tmp_path):
    said = train(write_recipe(tmp_path), "--dry-run")
    assert (said.code, said.err) == (0, "")
    assert "dspark, 1 layers, block 4, taps [0], mask token 4" in said.out
    assert "150 steps of 32 blocks" in said.out
    assert [file.name for file in tmp_path.iterdir()] == ["out.toml"], "nothing is written"


def test_a_faulty_recipe_is_told_in_a_sentence(train, tmp_path):
    file = write_recipe(tmp_path)
    good = file.read_text()
    for old, new, words in (
        ('kind = "dspark"', 'kind = "medusa"', "drafter.kind"),
        ("anchors = 8", "anchors = 0", "optimiser.anchors: got 0; it must be from 1"),
        ("steps = 150", "", "steps or seconds"),
        ("layers = 1", "layer = 1", "layer"),
        ("schema = 1", "schema = 9", "write schema = 1"),
    ):
        file.write_text(good.replace(old, new, 1))
        assert words in mistake(train(file, "--dry-run"))
    assert "none.toml" in mistake(train(tmp_path / "none.toml"))


def test_options_that_do_not_go_together(train, tmp_path):
    file = write_recipe(tmp_path)
    assert "drop --resume" in mistake(train(file, "--pack", 4, "--resume"))
    assert "--pack 7" in mistake(train(file, "--pack", 7))
    assert "train it first" in mistake(train(file, "--pack", 4))
    assert "--seconds 0" in mistake(train(file, "--seconds", 0))


def test_an_interrupt_saves_and_resume_goes_on(train, tmp_path, monkeypatch):
    file, rate_at = write_recipe(tmp_path, steps=6), loop.rate_at

    def pressed(step, *rest):
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return rate_at(step, *rest)

    monkeypatch.setattr(loop, "rate_at", pressed)
    before = signal.getsignal(signal.SIGINT)
    said = train(file)
    assert (said.code, said.out) == (130, "")
    assert "interrupted: saving" in said.err
    assert "stopped at step 3 of 6; --resume goes on" in said.err
    assert signal.getsignal(signal.SIGINT) is before
    assert (tmp_path / "out" / keep.STATE).exists()
    assert "add --resume" in mistake(train(file))
    monkeypatch.setattr(loop, "rate_at", rate_at)
    said = train(file, "--resume")
    assert said.code == 0
    assert said.err.strip().splitlines()[-1].startswith("written: ")
    assert (tmp_path / "out" / "model.safetensors").exists()
