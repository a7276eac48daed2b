"""`dspark train`: load the target, write the data, train, save. Also what a run would take, and the small copy that ships."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
from mlx.utils import tree_flatten

from dspark.checkpoints.load import load_model
from dspark.errors import InputError
from dspark.models.heads.head import Head
from dspark.models.target import Target
from dspark.platform import backend, size_text
from dspark.train import keep
from dspark.train.conversations import Conversation, stops_of, unpack_rows
from dspark.train.dataset import Batches, frequent
from dspark.train.design import count_parameters, design, mask_token, mix_of, new_head
from dspark.train.evaluate import TOKENS
from dspark.train.loop import Report, Run, begin
from dspark.train.pack import pack_drafter
from dspark.train.recipe import TrainRecipe, load_train_recipe
from dspark.train.save import write_drafter
from dspark.train.step import Lesson, make_step
from dspark.train.synthesise import Book, Writer, answers_to, read_prompts
from dspark.train.teach import head_table, make_teacher, same_head, unpack

PROMPTS = Path(__file__).parent / "prompts"
EVALUATION = ("chat", "code", "arithmetic")


@attrs.frozen(eq=False)
class Teacher:
    """The target, ready to teach: plain weights, and the tokenizer."""

    target: Target
    tokenizer: Any


def train(
    recipe_path: str | Path,
    *,
    resume: bool = False,
    dry_run: bool = False,
    pack: int | None = None,
    seconds: float | None = None,
    data_only: bool = False,
    report: Report | None = None,
) -> bool:
    """Train by a recipe; True when the drafter is finished and written.

    resume: go on from the state in the output folder, to the same weights as without a stop. seconds: stop after so long, so
    that it can be resumed. dry_run: only say what it would take. data_only: only write the data, with `seconds` no more than
    gets done by then. pack: write the small copy of a finished drafter with so many bits, and nothing else. Raises UserError
    for what cannot be done.
    """
    began = time.monotonic()
    report = report or Report()
    recipe = load_train_recipe(recipe_path)
    if pack is not None:
        stops = () if recipe.output.small_vocab is None else stops_of(load_teacher(recipe).tokenizer)
        report.line(f"written: {pack_drafter(recipe, pack, stops)}")
        return True
    if not resume and not dry_run and not data_only and (recipe.output_folder / keep.STATE).exists():
        raise InputError(
            f"{recipe.output_folder}: a run has begun there; add --resume, or name another [output] folder"
        )
    teacher = load_teacher(recipe)
    if dry_run:
        explain(recipe, teacher, report)
        return False
    book = write_data(recipe, teacher, report, began + seconds if data_only and seconds else None)
    if data_only:
        return False
    run = open_run(recipe, teacher, book, resume, report)
    done = run.go(None if seconds is None else began + seconds)
    if done:
        finish(run, teacher)
        report.line(f"written: {recipe.output_folder}")
    else:
        report.line(f"stopped at step {run.state.step} of {run.progress.total}; --resume goes on")
    return done


def load_teacher(recipe: TrainRecipe) -> Teacher:
    """The recipe's target in memory, its packed weights unpacked; bfloat16 on a GPU, float32 on a CPU."""
    said = recipe.target
    assert said.source is not None
    source = said.source
    if source.startswith(("./", "../")):
        source = str(recipe.place(source))
    dtype = said.dtype or ("bfloat16" if backend() != "cpu" and not recipe.optimiser.float32 else None)
    loaded = load_model(source, revision=said.revision, sha256=said.sha256, adapter_path=said.adapter_path, dtype=dtype)
    unpack(loaded.model)
    loaded.model.eval()
    return Teacher(Target(loaded.model, loaded.config, loaded.name), loaded.tokenizer)


def write_data(recipe: TrainRecipe, teacher: Teacher, report: Report, deadline: float | None = None) -> Book:
    """The recipe's conversations: read, or written first, as far as they get until the deadline."""
    prompts = () if recipe.data.prompts is None else read_prompts(recipe.place(recipe.data.prompts))
    began = time.monotonic()
    writer = Writer(teacher.target, teacher.tokenizer, recipe.data, recipe.data_folder, prompts, report.line, deadline)
    book = writer.book()
    for name in EVALUATION:
        file = recipe.data_folder / f"prompts-{name}.npz"
        if not file.exists():
            rows = answers_to(writer, read_prompts(PROMPTS / f"{name}.txt"), TOKENS)
            writer.store(file, rows)
    tokens = sum(len(row.answer) for row in book.train)
    report.line(f"{len(book.train)} conversations, {tokens} answer tokens ({time.monotonic() - began:.0f} s)")
    return book


def held_out_sets(recipe: TrainRecipe, book: Book) -> dict[str, list[Conversation]]:
    """What accepted length is measured on."""
    import numpy as np

    sets = {"synthetic": book.held_out}
    for name in EVALUATION:
        sets[name] = unpack_rows(np.load(recipe.data_folder / f"prompts-{name}.npz"))
    return sets


def make_lesson(recipe: TrainRecipe, teacher: Teacher, book: Book) -> Lesson:
    """Head, tables and losses."""
    target, table = teacher.target, head_table(teacher.target)
    config = design(
        recipe.drafter, target, mask_token(teacher.tokenizer, recipe.drafter.mask_token_id, target.vocab_size)
    )
    head = new_head(config, recipe.optimiser.seed)
    rows_of = None
    bare = same_head(target, table)
    if config.draft_vocab_size is not None:
        kept = frequent(book.train, config.draft_vocab_size, target.vocab_size, stops_of(teacher.tokenizer))
        head.reduce_vocabulary(mx.array(kept))
        table = mx.contiguous(table[mx.array(kept)])
        inverse = mx.full((target.vocab_size,), -1, dtype=mx.int32)
        inverse[mx.array(kept)] = mx.arange(len(kept), dtype=mx.int32)
        rows_of = inverse
    mx.eval(table, rows_of)
    head.bind(target.embedding, lambda hidden: hidden @ table.T, target.vocab_size)
    columns = head.target_ids

    def logits(last: mx.array) -> mx.array:
        if bare:
            return last @ table.T
        whole = target.head(last)
        return whole if columns is None else whole[..., columns]

    dtype = mx.float32 if backend() == "cpu" or recipe.optimiser.float32 else mx.bfloat16
    return Lesson(
        head=head,
        teach=make_teacher(target, config.target_layer_ids),
        table=table.astype(dtype),
        logits=logits,
        mix=mix_of(config.kind, config.block_size, recipe.optimiser),
        dtype=dtype,
        rows_of=rows_of,
    )


def open_run(recipe: TrainRecipe, teacher: Teacher, book: Book, resume: bool, report: Report) -> Run:
    """A run at its beginning or where it was left."""
    options = recipe.optimiser
    lesson = make_lesson(recipe, teacher, book)
    batches = Batches(book.train, recipe.data.lengths, options.rows, options.anchors, options.seed)
    step = make_step(lesson, options.clip, options.decay)
    report.line(f"{recipe.drafter.kind}: {count_parameters(lesson.head) / 1e6:.1f} million parameters")
    if resume:
        state, progress = keep.load_state(recipe.output_folder, recipe)
    else:
        recipe.output_folder.mkdir(parents=True, exist_ok=True)
        state, progress = begin(lesson, recipe, batches, step, report)
    return Run(recipe, lesson, batches, held_out_sets(recipe, book), report, state, progress, step)


def finish(run: Run, teacher: Teacher) -> None:
    """Write the drafter, its run recipe and the recipe that made it."""
    recipe, head = run.recipe, run.lesson.head
    reduced = head.config.draft_vocab_size is not None
    write_drafter(
        run.folder,
        head.config,
        run.state.parameters,
        num_target_layers=teacher.target.num_layers,
        target_name=recipe.target.source or teacher.target.name,
        target_ids=head.target_ids if reduced else None,
        lm_head=run.lesson.table if reduced else None,
    )
    (run.folder / "run.toml").write_text(run_recipe(recipe), encoding="utf-8")
    shutil.copyfile(recipe.path, run.folder / "train.toml")


def run_recipe(recipe: TrainRecipe) -> str:
    """A recipe that runs the drafter beside it."""
    import tomli_w

    target = {k: v for k, v in attrs.asdict(recipe.target).items() if k in ("source", "revision", "sha256") and v}
    if target["source"].startswith(("./", "../")):
        # Relative paths start where a recipe stands, and this one stands in the output folder.
        target["source"] = str(recipe.place(target["source"]).resolve())
    table = {
        "schema": 1,
        "name": f"{recipe.drafter.kind} for {recipe.target.source}",
        "cap": {"kind": "adaptive"},
        "target": target,
        "draft": {"kind": recipe.drafter.kind, "drafter": "./"},
    }
    return "# Written by dspark train; its first run calibrates it.\n" + tomli_w.dumps(table)


def explain(recipe: TrainRecipe, teacher: Teacher, report: Report) -> None:
    """Say what a run would take: sizes, memory, work."""
    options, target = recipe.optimiser, teacher.target
    mask = mask_token(teacher.tokenizer, recipe.drafter.mask_token_id, target.vocab_size)
    config = design(recipe.drafter, target, mask)
    parameters = count_parameters(Head(config))
    slots = options.rows * options.anchors * config.block_size
    wide = 4 if backend() == "cpu" or options.float32 else 2
    logits = min(slots, 8192) * config.head_vocab_size * (3 * wide + 12)
    teachers = options.rows * recipe.data.lengths[-1] * config.head_vocab_size * 2 * wide
    weights = sum(array.nbytes for _, array in tree_flatten(target.model.parameters()))
    state = parameters * (12 + 4 + wide)
    work = 6 * slots * (parameters + config.head_vocab_size * config.hidden_size)
    work += 2 * options.rows * recipe.data.lengths[-1] * weights / wide
    report.line(
        f"drafter   {config.kind}, {len(config.layers)} layers, block {config.block_size}, taps "
        f"{list(config.target_layer_ids)}, mask token {mask}, {parameters / 1e6:.1f} million parameters"
    )
    report.line(
        f"written   {size_text(parameters * 2)} in bfloat16, about {size_text(int(parameters * 0.6))} in 4 bits"
    )
    report.line(
        f"memory    about {size_text(int(weights + state + logits + teachers))}: target {size_text(weights)}, "
        f"state {size_text(state)}, logits {size_text(logits + teachers)}"
    )
    much = f"{options.steps} steps" if options.steps else f"as many steps as fit into {options.seconds:g} s"
    report.line(f"work      {much} of {options.rows * options.anchors} blocks, about {work / 1e12:.2f} TFLOP each")
