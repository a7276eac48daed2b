"""`dspark run --batch N`: many prompts in one session, a line of JSON for each answer, in the order of the prompts."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import attrs

from dspark.blas import open_blas
from dspark.cli.batch_file import Line, first_of, read_lines
from dspark.cli.batch_progress import BatchProgress, in_all
from dspark.cli.choose import choose
from dspark.cli.failures import FAILURE, INTERRUPTED, OK, say
from dspark.cli.interrupt import Interrupts
from dspark.cli.options import RunOptions
from dspark.cli.screen import Answer, PlainScreen, dim, hushed, short
from dspark.errors import InputError
from dspark.rows import Result
from dspark.telemetry.panel import Facts
from dspark.telemetry.sinks import JsonLines
from dspark.telemetry.summary import as_dict

FIGURES = ("text", "finish", "error", "prompt_tokens", "generated_tokens", "rounds", "accepted_length")
ENDED = ("stop", "length", "error")
LEAVE_WITHIN_S = 0.5
# JSON leaves them as they are, and many a reader ends a line at them.
LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}


class Writer:
    """Writes answers in the order of the prompts: each as soon as it and those before it are done.

    `rest` writes what is done behind one that is not, and what of a cancelled session was begun. Safe to call from the
    thread that an interrupt runs on. written, failed: how many lines were written, and of them ended by an error.
    """

    def __init__(self, answer: Answer, lines: Sequence[Line], seeds: Sequence[int], every_figure: bool):
        self._answer, self._lines, self._seeds, self._every = answer, lines, seeds, every_figure
        self._next, self.written, self.failed = 0, 0, 0
        self._lock = threading.Lock()

    def advance(self, session: Any) -> None:
        with self._lock:
            while self._next < len(self._lines) and (result := session.result_of(self._next)).finish in ENDED:
                self._write(self._next, result)
                self._next += 1

    def rest(self, session: Any, wait_s: float = -1) -> None:
        if not self._lock.acquire(timeout=wait_s):
            return
        try:
            while self._next < len(self._lines):
                result = session.result_of(self._next)
                if result.finish in ENDED or (result.finish == "cancelled" and result.tokens):
                    self._write(self._next, result)
                self._next += 1
        finally:
            self._lock.release()

    def _write(self, index: int, result: Result) -> None:
        line, figures = self._lines[index], as_dict(result)
        said: dict[str, Any] = {"index": index, "line": line.number}
        if line.tag is not None:
            said["id"] = line.tag
        said |= figures if self._every else {name: figures[name] for name in FIGURES}
        if result.error is None:
            del said["error"]
        text = json.dumps(said | {"seed": self._seeds[index]}, ensure_ascii=False)
        self._answer.write(text.translate(LINE_ENDS) + "\n")
        self.written += 1
        self.failed += result.finish == "error"


def run_batch(options: RunOptions) -> int:
    """Answer all prompts and return the exit code: 1 where one of them ended by an error, which its line says."""
    name, lines = read_lines(options)
    answer = Answer()
    screen = PlainScreen(answer, options.quiet)
    events = None if options.events is None else JsonLines(options.events)
    with contextlib.ExitStack() as stack:
        stack.enter_context(events or contextlib.nullcontext())
        stack.enter_context(hushed(screen))
        stack.enter_context(screen)
        return _answer_all(options, name, lines, answer, screen, events)


def _answer_all(
    options: RunOptions, name: str, lines: list[Line], answer: Answer, screen: PlainScreen, events: JsonLines | None
) -> int:
    open_blas()
    from dspark.assemble import assemble
    from dspark.cli.calibrated import calibrated
    from dspark.cli.overrides import load_recipe

    recipe = load_recipe(choose(options, screen.note))
    screen.load(f"loading {short(recipe.target.source or 'the target')}")
    engine = assemble(recipe, progress=screen.download, say=screen.load, probe=not options.no_probe)
    for note in engine.notes:
        screen.note(note)
    _, engine = calibrated(recipe, engine, screen, not options.no_calibrate, batch=int(options.batch or 1))
    session, seeds = _open(options, name, lines, engine, events)
    screen.opened(Facts(engine.target.name))
    writer = Writer(answer, lines, seeds, options.json)
    progress = BatchProgress(len(lines), shown=not options.quiet and options.live != "off")
    began = time.perf_counter()

    def leave() -> None:
        """The second Ctrl-C: keep what is done and be gone, whatever the device is doing."""
        with contextlib.suppress(Exception):
            progress.erase()
            writer.rest(session, LEAVE_WITHIN_S)
            sys.stdout.flush()
        os._exit(INTERRUPTED)

    with session, progress, Interrupts(session.cancel, leave) as interrupts:
        try:
            _follow(session, writer, progress, screen)
        finally:
            progress.erase()
            writer.rest(session)
    if not options.quiet:
        for text in in_all(session.results, time.perf_counter() - began):
            sys.stderr.write(dim(text) + "\n")
    return _exit_code(interrupts.exit_code, writer, len(lines), events)


def _follow(session: Any, writer: Writer, progress: BatchProgress, screen: PlainScreen) -> None:
    told = False
    for commit in session:
        if not told:
            told = True
            for note in session.notes:
                screen.note(note)
        progress.count(commit)
        if any(row.finish for row in commit.rows):
            with progress.lifted():
                writer.advance(session)


def _open(options: RunOptions, name: str, lines: list[Line], engine: Any, events: Any) -> tuple[Any, tuple[int, ...]]:
    """The session, nothing of it generated yet, and its seeds. Raises InputError for lines that this target cannot take."""
    from dspark.prompt import check_context
    from dspark.session import SessionOptions
    from dspark.stages.keys import fresh_seed, row_seeds

    shared = row_seeds(fresh_seed() if engine.seed is None else engine.seed, len(lines))
    seeds = tuple(own if line.seed is None else line.seed for own, line in zip(shared, lines, strict=True))
    most = int(options.max_tokens)
    limits = [most if line.max_tokens is None else line.max_tokens for line in lines]
    prompts, samplings, faults = [], [], []
    for line, limit in zip(lines, limits, strict=True):
        try:
            prompts.append(engine.encode(line.prompt))
            check_context(prompts[-1], engine.context_length, limit)
            samplings.append(_sampling(engine, line))
        except InputError as error:
            faults.append(f"{name}, line {line.number}: {error}")
    if faults:
        raise InputError(first_of(faults))
    session = engine.open(
        prompts,
        max_tokens=limits,
        sampling=samplings,
        seed=seeds,
        stop=[tuple(options.stop or ()) if line.stop is None else line.stop for line in lines],
        options=SessionOptions(sinks=(events,) if events else (), batch=int(options.batch or 1)),
    )
    return session, seeds


def _sampling(engine: Any, line: Line) -> Any:
    """A line's own sampling options over the run's, None where it has none."""
    if not line.sampling:
        return None
    names = ", ".join(line.sampling)
    if engine.sampling is None:
        raise InputError(
            f"this recipe's accept has a chain of its own, which leaves no place for {names}; drop one of both"
        )
    chosen = attrs.evolve(engine.sampling, **line.sampling)
    if engine.accept_kind == "greedy" and not chosen.is_greedy:
        raise InputError(f"this recipe's accept is greedy, which ignores {names}; drop one of both")
    return chosen


def _exit_code(signalled: int | None, writer: Writer, prompts: int, events: JsonLines | None) -> int:
    if signalled:
        say(f"dspark: interrupted; {writer.written} of {prompts} answers were written")
        return signalled
    if writer.failed:
        say(f"dspark: {writer.failed} of {prompts} prompts ended by an error, which their lines say")
        return FAILURE
    if events is not None and events.problem:
        say(f"dspark: {events.problem}")
        return FAILURE
    return OK
