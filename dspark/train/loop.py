"""A run: data, steps, evaluations, state on disk, and at the end the drafter in its published layout."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
from mlx.utils import tree_map

from dspark.train import keep
from dspark.train.conversations import Conversation
from dspark.train.dataset import Batches
from dspark.train.evaluate import Accepted, accepted_length, make_measure
from dspark.train.optimise import State, fresh, rate_at
from dspark.train.quick import compiled
from dspark.train.recipe import TrainRecipe
from dspark.train.step import Lesson, Step

# Steps between two reads of the metrics; in between the device runs ahead.
READ_EVERY = 20
TIMED_STEPS = 24
# Share of `seconds` that evaluations and saving take.
OVERHEAD = 0.03
EVALUATED_ROWS = 8


@attrs.frozen(eq=False)
class Report:
    """Where a run tells how it goes. line: a sentence; step: step, total and metrics, every READ_EVERY steps."""

    line: Callable[[str], None] = lambda text: None
    step: Callable[[int, int, dict[str, float]], None] = lambda step, total, metrics: None


@attrs.define(eq=False)
class Run:
    """A training run under way. `go` makes steps until they are done, the deadline passes or it is interrupted."""

    recipe: TrainRecipe
    lesson: Lesson
    batches: Batches
    held_out: dict[str, list[Conversation]]
    report: Report
    state: State
    progress: keep.Progress
    step: Step

    @property
    def folder(self) -> Path:
        return self.recipe.output_folder

    @property
    def done(self) -> bool:
        return self.state.step >= self.progress.total

    def go(self, deadline: float | None) -> bool:
        """True when all steps are made. The state is saved in any case; Ctrl-C saves and returns False."""
        measure = compiled(make_measure(self.lesson.head, self.lesson.teach, self.lesson.cast))
        try:
            self._steps(measure, deadline)
        except KeyboardInterrupt:
            self.report.line("interrupted: saving")
        keep.save_state(self.folder, self.recipe, self.state, self.progress)
        return self.done

    def _steps(self, measure: Any, deadline: float | None) -> None:
        options, total = self.recipe.optimiser, self.progress.total
        marks = {round(total * (i + 1) / options.evaluations) for i in range(options.evaluations)}
        if self.state.step == 0:
            self.evaluate(measure)
        began, blocks, waiting = time.monotonic(), 0, []
        while not self.done and (deadline is None or time.monotonic() < deadline):
            rate = rate_at(self.state.step, total, options.rate, options.warmup)
            made, metrics = self.step(self.state, self.batches.at(self.state.step), rate)
            mx.async_eval(made.parameters, made.first, made.second, metrics)
            if waiting:
                # One step stays in flight: enough to keep the device busy, and an interrupt waits for no more.
                mx.eval(waiting[-1]["loss"])
            self.state = made
            waiting.append(metrics)
            mark = self.state.step in marks
            if mark or self.done or len(waiting) == READ_EVERY:
                blocks = sum(int(m["blocks"].item()) for m in waiting)
                self.progress.trained_s += time.monotonic() - began
                self._tell(waiting, rate, blocks / (time.monotonic() - began))
                waiting = []
                if mark:
                    self.evaluate(measure)
                    keep.save_state(self.folder, self.recipe, self.state, self.progress)
                began = time.monotonic()
        if waiting:
            mx.eval(waiting[-1]["loss"])
            self.progress.trained_s += time.monotonic() - began

    def _tell(self, waiting: list[dict[str, Any]], rate: float, speed: float) -> None:
        means = {name: sum(float(m[name].item()) for m in waiting) / len(waiting) for name in waiting[0]}
        means = {name: round(value, 5) for name, value in means.items()} | {"rate": rate, "blocks_per_s": round(speed)}
        keep.log(self.folder, step=self.state.step, trained_s=round(self.progress.trained_s, 2), **means)
        self.report.step(self.state.step, self.progress.total, means)

    def evaluate(self, measure: Any) -> dict[str, Accepted]:
        """Accepted lengths on every held-out set; logged."""
        began, found = time.monotonic(), {}
        for name, texts in self.held_out.items():
            rows = min(EVALUATED_ROWS, len(texts))
            found[name] = accepted_length(measure, self.state.parameters, texts, self.recipe.data.lengths, rows)
            self.report.line(f"step {self.state.step}: accepted length on {name} {found[name].line()}")
        said = {name: accepted._asdict() for name, accepted in found.items()}
        self.progress.history.append({"step": self.state.step, **said})
        keep.log(self.folder, step=self.state.step, evaluation=said, seconds=round(time.monotonic() - began, 1))
        return found


def begin(
    lesson: Lesson, recipe: TrainRecipe, batches: Batches, step: Step, report: Report
) -> tuple[State, keep.Progress]:
    """A run's first state and its number of steps: the recipe's, or as many as its seconds allow on this machine."""
    options = recipe.optimiser
    state = fresh(lesson.head.trainable_parameters())
    mx.eval(state.parameters, state.first, state.second)
    if options.steps is not None:
        return state, keep.Progress(options.steps)
    assert options.seconds is not None
    began = time.monotonic()
    each = time_step(step, state, batches)
    total = max(1, int(options.seconds * (1 - OVERHEAD) / each))
    spent = time.monotonic() - began
    report.line(f"a step takes {each * 1000:.1f} ms here (found in {spent:.0f} s): {total} steps")
    return state, keep.Progress(total)


def time_step(step: Step, state: State, batches: Batches) -> float:
    """Seconds a step, measured on a copy of the state after every shape has been compiled."""
    parameters, first, second = (tree_map(lambda a: a + 0, part) for part in state[:3])
    copy = State(parameters, first, second, 0)
    metrics: dict[str, mx.array] = {}
    for batch in batches.each_class():
        copy, metrics = step(copy, batch, 1e-9)
        mx.eval(copy.parameters, metrics)
    began = time.monotonic()
    for i in range(TIMED_STEPS):
        before = metrics["loss"]
        copy, metrics = step(copy, batches.at(i), 1e-9)
        mx.async_eval(copy.parameters, copy.first, copy.second, metrics)
        mx.eval(before)
    mx.eval(copy.parameters, metrics)
    return (time.monotonic() - began) / TIMED_STEPS
