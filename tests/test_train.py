"""Training: losses and gradients as published, a drafter that learns, runs that resume exactly, data that repeats itself."""

from __future__ import annotations

import json
import re
from collections import Counter

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from dspark import recipe as recipes
from dspark.caps import AdaptiveCap
from dspark.checkpoints.drafter import load_drafter
from dspark.errors import InputError
from dspark.models.heads.packed import packed_hidden
from dspark.models.lending import lend_tables
from dspark.stages.draft import DFlash, DFlash2, DSpark
from dspark.train import command, keep, loop
from dspark.train.clean import cut_loop, loop_start
from dspark.train.conversations import stops_of, unpack_rows
from dspark.train.dataset import Batch
from dspark.train.losses import Mix, decayed
from dspark.train.recipe import load_train_recipe
from dspark.train.step import Lesson
from dspark.train.synthesise import Writer
from dspark.train.teach import make_teacher
from tests.parity_sets import read_set
from tests.tiny_school import tiny_teacher, write_recipe

# Float32 on both sides, sums of a few thousand terms in another order.
LOSS, GRADIENT = 1e-4, 1e-3
# What trimmed vectors hold of a gradient.
EVERY = 8
DSPARK_MIX = Mix(ce=0.1, l1=0.9, confidence=1.0, gamma=4.0)
DFLASH2_MIX = Mix(ce=0.0, l1=0.0, kl=1.0, selector=1.0, gamma=4.0, by_weights=False)


# ---- the published losses -----------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class Masked(Lesson):
    """A lesson whose labels count where a vector says so: upstream texts have several answers, ours have one."""

    said: np.ndarray | None = None

    def slots(self, batch, last):
        counts = mx.array(self.said.astype(np.float32))
        weights = decayed(counts, self.mix.gamma).reshape(-1)
        return super().slots(batch, last)._replace(counts=counts.reshape(-1), weights=weights)


def graded(name, mix, folder):
    """The vector's set, the terms of its loss and the gradients by name."""
    vector = read_set(name)
    head, arrays = load_drafter(vector.write(folder / name), bits=None), vector.arrays
    table = head.lm_head.weight
    ids, anchors = mx.array(arrays["input_ids"], dtype=mx.int32), mx.array(np.atleast_2d(arrays["anchor_positions"]))
    said = arrays["out_eval_mask"] if "out_eval_mask" in arrays else arrays["out_aligned_loss_mask"][None, :, 1:]
    kept = np.atleast_2d(arrays["block_keep_mask" if "block_keep_mask" in arrays else "anchor_valid"])
    batch = Batch(ids, anchors.astype(mx.int32), mx.array(kept > 0), mx.array([ids.shape[1]] * ids.shape[0]))
    lesson = Masked(head, None, table, lambda last: last @ table.T, mix, mx.float32, said=said)
    taps, last = (mx.array(arrays[f"target_{n}hidden_states"]) for n in ("", "last_"))
    trained = [p for p in tree_flatten(head.trainable_parameters()) if not p[0].startswith(("embed_tokens", "lm_head"))]

    def loss(parameters):
        terms = lesson.loss(parameters, batch, taps, last)
        return terms.total, terms.parts

    (total, parts), gradients = mx.value_and_grad(loss)(tree_unflatten(trained))
    return vector, {"total": total, **parts}, dict(tree_flatten(gradients))


DRAFTS = {"dspark": DSpark, "dflash": DFlash, "dflash2": DFlash2, "reduced": DSpark}
CASES = {
    "dspark_qwen3_train": (DSPARK_MIX, {"total": "total", "ce": "ce", "l1": "l1", "conf": "confidence"}),
    "dflash2_train": (DFLASH2_MIX, {"total": "total", "unary": "kl", "selector": "selector"}),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_the_published_ones(name, tmp_path):
    mix, terms = CASES[name]
    vector, found, gradients = graded(name, mix, tmp_path)
    for published, ours in terms.items():
        assert found[ours].item() == pytest.approx(float(vector.arrays[f"out_loss_{published}"]), rel=LOSS), published
    wanted = {key.removeprefix("grad."): array for key, array in vector.arrays.items() if key.startswith("grad.")}
    assert set(gradients) == set(wanted)
    for key, array in wanted.items():
        own = np.array(gradients[key]).reshape(-1)
        own = own if own.size == array.size else own[::EVERY]
        assert np.abs(own - array).max() <= GRADIENT * vector.index["grad_max"][key], key


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("change", [{"gamma": 7.0}, {"by_weights": None}])
def test_another_decay_or_norm_is_noticed(name, change, tmp_path):
    mix, _ = CASES[name]
    change = {"by_weights": not mix.by_weights} if "by_weights" in change else change
    vector, found, _ = graded(name, mix._replace(**change), tmp_path)
    assert found["total"].item() != pytest.approx(float(vector.arrays["out_loss_total"]), rel=10 * LOSS)


# ---- a run --------------------------------------------------------------------------------------------------------------

# Of the tiny language, whose untrained drafter keeps a draft a round; 150 steps gave 2.2 times its accepted length.
LONGER, LOWER = 1.8, 0.6


@pytest.fixture(scope="module")
def school(tmp_path_factory):
    """A folder whose data all runs share; the target is the tiny one, whatever a recipe says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "load_teacher", lambda recipe: tiny_teacher())
        patch.setattr(command, "EVALUATION", ())
        patch.setattr(loop, "READ_EVERY", 5)
        yield tmp_path_factory.mktemp("school")


@pytest.fixture
def short(monkeypatch):
    """Runs that do not evaluate, which takes longer than their steps."""
    monkeypatch.setattr(loop.Run, "evaluate", lambda self, measure: {})


def parameters(folder):
    return {k: np.array(v) for k, v in mx.load(str(folder / keep.STATE)).items()}


def logits_of(head, teacher):
    """What a drafter makes of three blocks of a text: hidden rows, and logits behind given tokens."""
    ids = mx.array([[1, 20, 21, 22, 23, 2, 3, 30, 31, 32, 33, 34]])
    anchors = mx.array([[6, 8, 11]])
    taps, _ = make_teacher(teacher.target, head.config.target_layer_ids)(ids)
    hidden = packed_hidden(head, taps, anchors, mx.take_along_axis(ids, anchors, axis=1))
    hidden = hidden[:, :, head.config.first_slot :]
    before = mx.broadcast_to(mx.arange(5, 5 + hidden.shape[2]), hidden.shape[:3])
    return head.step_logits(head.base_logits(hidden), hidden, before)


def trained_head(file, rounded=True):
    """The head that a run holds, and its teacher; `rounded` to what a published file stores."""
    recipe, teacher = load_train_recipe(file), tiny_teacher()
    state, _ = keep.load_state(recipe.output_folder, recipe)
    lesson = command.make_lesson(recipe, teacher, command.write_data(recipe, teacher, loop.Report()))
    cast = lambda p: p.astype(mx.bfloat16).astype(mx.float32) if rounded else p
    lesson.head.update(tree_map(cast, state.parameters))
    if lesson.rows_of is not None:
        # A reduced vocabulary brings its rows, which are stored like the rest.
        rows = cast(lesson.table)
        lesson.head.bind(teacher.target.embedding, lambda hidden: hidden @ rows.T, teacher.target.vocab_size)
    return lesson.head, teacher


def loaded(folder, teacher):
    head = load_drafter(folder, bits=None, dtype=mx.float32)
    lend_tables(head, teacher.target)
    return head


def test_a_tiny_target_teaches_its_drafter(school):
    file = write_recipe(school, output="learnt")
    assert command.train(file)
    told = [json.loads(line) for line in (school / "learnt" / keep.LOG).read_text().splitlines()]
    losses = [line["loss"] for line in told if "loss" in line]
    assert losses[-1] < LOWER * losses[0]
    before, after = (line["evaluation"]["synthetic"]["full"] for line in told if "evaluation" in line)
    assert after > LONGER * before
    with pytest.raises(InputError, match="add --resume"):
        command.train(file)


class Stop:
    """Presses Ctrl-C behind a step."""

    def __init__(self, at):
        self.at = at

    def __call__(self, step, total, metrics):
        if step == self.at:
            raise KeyboardInterrupt


def test_a_run_that_was_stopped_ends_in_the_same_bits(school, short):
    whole, parts, forgetful = (write_recipe(school, output=name, steps=20) for name in ("whole", "parts", "forgetful"))
    assert command.train(whole)
    for file in (parts, forgetful):
        assert not command.train(file, report=loop.Report(step=Stop(10)))
        assert not (school / file.stem / "model.safetensors").exists()
    recipe = load_train_recipe(forgetful)
    state, progress = keep.load_state(recipe.output_folder, recipe)
    assert state.step == 10
    keep.save_state(
        recipe.output_folder, recipe, state._replace(second=tree_map(mx.zeros_like, state.second)), progress
    )
    assert command.train(parts, resume=True)
    assert command.train(forgetful, resume=True)
    wanted, found, other = (parameters(school / name) for name in ("whole", "parts", "forgetful"))
    assert set(wanted) == set(found)
    assert all(np.array_equal(wanted[k], found[k]) for k in wanted)
    # What loses its moments goes on elsewhere.
    assert not all(np.array_equal(wanted[k], other[k]) for k in wanted)


def test_a_state_is_refused_to_another_recipe(school, short):
    file = write_recipe(school, output="refused", steps=6)
    assert not command.train(file, report=loop.Report(step=Stop(5)))
    file.write_text(file.read_text().replace("rate = 4e-3", "rate = 1e-3"))
    with pytest.raises(InputError, match="belongs to a recipe that said something else"):
        command.train(file, resume=True)


@pytest.mark.parametrize("kind", ["dspark", "dflash", "dflash2", "reduced"])
def test_what_is_written_loads_and_gives_the_same_logits(kind, school, short):
    file = write_recipe(school, output=f"written-{kind}", steps=5, kind="dspark" if kind == "reduced" else kind)
    if kind == "reduced":
        file.write_text(file.read_text().replace("markov_rank", "draft_vocab = 40\nmarkov_rank"))
    assert command.train(file)
    head, teacher = trained_head(file)
    wanted, found = logits_of(head, teacher), logits_of(loaded(school / f"written-{kind}", teacher), teacher)
    assert mx.array_equal(wanted, found).item()
    run = recipes.load(school / f"written-{kind}" / "run.toml")
    assert isinstance(run.draft, DRAFTS[kind])
    assert run.cap == AdaptiveCap()
    assert run.target.source == str(school / "target")
    assert run.draft.drafter == str(school / f"written-{kind}")
    unrounded = logits_of(trained_head(file, rounded=False)[0], teacher)
    assert not mx.array_equal(unrounded, found).item()


def test_the_packed_copy_loads(school, short):
    file = write_recipe(school, output="small", steps=5)
    with pytest.raises(InputError, match="no finished drafter"):
        command.train(file, pack=8)
    assert command.train(file)
    assert command.train(file, pack=8)
    copy = school / "small-8bit"
    teacher = tiny_teacher()
    wanted, found = (logits_of(loaded(folder, teacher), teacher) for folder in (school / "small", copy))
    # 8 bits are steps of 1/255 of a group's range: a few in a hundred over a layer.
    apart = (mx.abs(wanted - found).max() / mx.abs(wanted).max()).item()
    assert 0 < apart < 0.05
    assert (copy / "run.toml").is_file()
    with pytest.raises(InputError, match="--pack 7"):
        command.train(file, pack=7)


def test_a_small_copy_drafts_the_frequent_tokens_alone(school, short):
    """Its logits are the whole copy's at the tokens that the data says most; the rows are the target's own."""
    teacher = tiny_teacher()
    file = write_recipe(school, output="fewer", steps=5)
    assert command.train(file)
    assert command.train(file, pack=8)
    whole = loaded(school / "fewer-8bit", teacher)
    text = file.read_text()
    file.write_text(text.replace("[output]\n", "[output]\nsmall_vocab = 40\n"))
    assert command.train(file, pack=8)
    few = loaded(school / "fewer-8bit", teacher)
    assert few.config.draft_vocab_size == 40
    assert few.config.lm_head == "borrowed"
    kept = few.target_ids.tolist()
    book = [r for f in sorted((school / "data").glob("train-*.npz")) for r in unpack_rows(np.load(f))]
    said = Counter(token for row in book for token in row.answer)
    assert min(said[t] for t in kept if t not in stops_of(teacher.tokenizer)) >= max(
        [said[t] for t in said if t not in kept], default=0
    )
    wanted, found = logits_of(whole, teacher)[..., few.target_ids], logits_of(few, teacher)
    assert mx.abs(wanted - found).max().item() < 1e-4
    assert mx.abs(wanted[..., ::-1] - found).max().item() > 1e-4


def test_a_small_vocabulary_needs_its_data(school, short):
    file = write_recipe(school, output="lost", steps=5)
    assert command.train(file)
    text = file.read_text().replace("[output]\n", "[output]\nsmall_vocab = 40\n")
    file.write_text(re.sub(r'(\[data\]\n(?:.*\n)*?)folder = ".*"', r'\1folder = "gone"', text))
    with pytest.raises(InputError, match="no training data there"):
        command.train(file, pack=8)
    file.write_text(text.replace("small_vocab = 40", "small_vocab = 99999"))
    with pytest.raises(InputError, match="take fewer"):
        command.train(file, pack=8)


# ---- data ---------------------------------------------------------------------------------------------------------------


def plan_of(folder, **changes):
    folder.mkdir(exist_ok=True)
    return attrs.evolve(load_train_recipe(write_recipe(folder)).data, **changes)


def written(folder, teacher=None, prompts=(), **changes):
    """The book that a tiny target writes into a folder."""
    teacher = teacher or tiny_teacher()
    return Writer(teacher.target, teacher.tokenizer, plan_of(folder.parent, **changes), folder, prompts).book()


def test_data_repeats_by_its_seed(tmp_path):
    first, again, other = (
        written(tmp_path / name, seed=seed) for name, seed in (("first", 0), ("again", 0), ("other", 1))
    )
    assert first.train
    assert len(first.held_out) == 8
    assert first == again
    assert first != other
    with pytest.raises(InputError, match="another plan"):
        written(tmp_path / "first", seed=1)


def test_no_question_is_asked_twice(tmp_path):
    said = ("twice", "once", " twice ")
    book = written(tmp_path / "data", prompts=said, held_out=2)
    drawn = [text for file in (tmp_path / "data").glob("questions-*.json") for text in json.loads(file.read_text())]
    asked = [tuple(row.prompt) for row in (*book.train, *book.held_out)]
    assert len(set(asked)) == len(asked)
    assert asked.count(tuple(tiny_teacher().tokenizer.apply_chat_template([{"content": "twice"}], True))) == 1
    # Drawn questions are stored with their doubles, and answers too short to learn from are left out.
    assert len(asked) <= len({*drawn, "twice", "once"}) < len(drawn) + len(said)


def test_answers_lose_the_loops_at_their_ends(tmp_path):
    book = written(tmp_path / "data", tiny_teacher(cycle=4), answer_tokens=48)
    assert book.train
    assert all(loop_start(row.answer) is None for row in book.train)
    # Those kept apart are whole, as a drafter meets them.
    assert any(loop_start(row.answer) is not None for row in book.held_out)


def test_a_periodic_tail_is_found_where_it_begins():
    said = [*range(100, 110), *[1, 2, 3] * 8]
    assert loop_start(said) == 13
    assert cut_loop(said) == said[:13]
    assert loop_start([*said, 4]) is None
    assert loop_start([1, 2, 3] * 5) is None, "too short to be told from a list"


def test_data_goes_on_behind_a_kill(tmp_path):
    whole, folder = written(tmp_path / "whole"), tmp_path / "parts"
    written(folder)
    last = max(folder.glob("train-*.npz"), key=lambda file: (file.stat().st_mtime_ns, file.name))
    last.with_name(last.name + ".part").write_bytes(last.read_bytes()[:20])
    last.unlink()
    kept = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert written(folder) == whole
    assert last.exists()
    changed = {file.name for file, at in kept.items() if not file.exists() or file.stat().st_mtime_ns != at}
    assert changed == {last.name + ".part"}, "what was there is not written again"
