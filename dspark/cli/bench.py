"""`dspark bench`: a recipe against decoding alone and against other programs, arms in turn, texts compared."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dspark.blas import open_blas
from dspark.cli.bench_options import STOCK, BenchOptions
from dspark.cli.failures import FAILURE, OK, say
from dspark.cli.options import RunOptions
from dspark.cli.run import draft_in_words, versions
from dspark.cli.screen import LOG_EVERY_S, Answer, PlainScreen, dim, hushed
from dspark.errors import InputError
from dspark.telemetry.terminal import is_terminal, size


def bench(options: BenchOptions) -> int:
    """Measure, print the report, and return the exit code: 1 where the recipe says what its target does not."""
    from dspark.bench.peers import pythons
    from dspark.bench.prompts import read_set

    if options.profile and (given := options.compares):
        raise InputError(f"--profile looks at a recipe and its target alone; drop {given}")
    python_of = pythons(options.peer_python)  # type: ignore[arg-type]
    for name in options.against:
        if (peer := name.removesuffix(STOCK)).startswith("mlx-") and peer != "mlx-lm" and peer not in python_of:
            raise InputError(
                f"--against {name} needs --peer-python {peer}=/path/to/python, of an environment that has it"
            )
    sets = [read_set(name) for name in options.prompts]
    if not sets:
        raise InputError("--prompts names no set")
    out = None if options.json is None else _writable(options.json)
    answer = Answer()
    screen, progress = PlainScreen(answer, options.quiet), Progress(not options.quiet)
    with contextlib.ExitStack() as stack:
        stack.enter_context(hushed(screen))
        stack.callback(progress.erase)
        return _measure(options, sets, python_of, answer, screen, progress, out, stack)


def _measure(
    options: BenchOptions,
    sets: Any,
    python_of: Any,
    answer: Answer,
    screen: Any,
    progress: Progress,
    out: Any,
    stack: Any,
) -> int:
    open_blas()
    from dspark.assemble import assemble
    from dspark.bench.arms import greedy
    from dspark.bench.measure import measure
    from dspark.bench.report import OURS, as_dict, make_report
    from dspark.bench.same import gap_behind
    from dspark.bench.words import lines_of
    from dspark.cli.bench_arms import make_arms, questions_of
    from dspark.cli.calibrated import calibrated
    from dspark.cli.overrides import load_recipe

    recipe = load_recipe(_run_options(options))
    engine = greedy(assemble(recipe, progress=screen.download, say=screen.load))
    for note in engine.notes:
        screen.note(note)
    recipe, engine = calibrated(recipe, engine, screen, not options.no_calibrate)
    questions = questions_of(engine, sets, int(options.max_tokens))
    if options.profile:
        return _profile(options, recipe, engine, questions, answer, progress, out)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dspark-bench-")))
    arms, dropped = make_arms(recipe, engine, options.against, python_of, folder, stack, progress)
    found = measure(arms, questions, int(options.repeats), int(options.max_tokens), progress)
    found.dropped |= dropped
    report = make_report(found, engine.stop_tokens, int(options.max_tokens), lambda ids: gap_behind(engine.target, ids))
    progress.erase()
    answer.write("\n".join([*_head(options, recipe, engine, arms, found), *lines_of(report)]) + "\n")
    if out is not None:
        facts = {arm.name: arm.about for arm in arms}
        with out:
            json.dump({**_stamp(options, recipe, engine), "arms": facts, **as_dict(report)}, out, indent=1)
    if report.wrong(OURS):
        say(f"dspark: {OURS} does not say what {report.reference} says, and rounding does not explain it")
        return FAILURE
    return OK


def _profile(
    options: BenchOptions, recipe: Any, engine: Any, questions: Any, answer: Answer, progress: Progress, out: Any
) -> int:
    from dspark.bench.profile import profile
    from dspark.bench.profile_words import profile_dict, profile_lines

    found = profile(engine, questions, int(options.max_tokens), progress)
    progress.erase()
    method = f"method   greedy, at most {options.max_tokens} tokens, one answer a prompt, recipe and target in turn"
    answer.write("\n".join([*_facts(options, recipe, engine), method, *profile_lines(found)]) + "\n")
    if out is not None:
        with out:
            json.dump({**_stamp(options, recipe, engine), "profile": profile_dict(found)}, out, indent=1)
    return OK


def _run_options(options: BenchOptions) -> RunOptions:
    shared = ("target", "drafter", "dtype", "cap", "settings")
    return RunOptions(recipe=options.recipe, **{name: getattr(options, name) for name in shared})


def _writable(path: str) -> Any:
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--json {path}: cannot be written ({error.strerror})") from None


def _facts(options: BenchOptions, recipe: Any, engine: Any, load: str = "") -> list[str]:
    """What was measured, and where."""
    from dspark.bench.folders import held_dtype
    from dspark.platform import machine, size_text

    here = machine()
    return [
        f"machine  {here.chip}, {here.backend}, {here.cores} cores, {size_text(here.memory_bytes)}, mlx {here.mlx}, "
        f"BLAS {here.blas}{load}",
        f"recipe   {recipe.path or options.recipe}",
        f"target   {engine.target.name}, {held_dtype(engine)}",
        f"drafter  {draft_in_words(engine.pipeline.draft)}",
    ]


def _head(options: BenchOptions, recipe: Any, engine: Any, arms: Any, found: Any) -> list[str]:
    """What was measured, where and how."""
    from dspark.cli.bench_arms import same_format
    from dspark.platform import machine

    load = "" if found.load is None else f"; load {found.load[0]:.1f} before, {found.load[1]:.1f} after"
    lines = [
        *_facts(options, recipe, engine, load),
        f"method   greedy, at most {options.max_tokens} tokens, one untimed pass and {options.repeats} timed, arms in turn",
    ]
    lines += [f"arm      {arm.name}: {arm.about}" for arm in arms]
    lines += [f"note     {note}" for arm in arms if (note := same_format(arm, engine))]
    if found.load is not None and max(found.load) > 1.5 * machine().cores:
        lines.append("note     other programs kept this machine busy: expect wide intervals")
    return lines


def _stamp(options: BenchOptions, recipe: Any, engine: Any) -> dict[str, Any]:
    from dspark.platform import machine

    here = machine()
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": ["dspark", *sys.argv[1:]],
        "machine": {"id": here.id, **here._asdict()},
        "versions": versions(),
        "recipe": recipe.path or options.recipe,
        "changes": [str(change) for change in recipe.changes],
        "target": engine.target.name,
        "drafter": draft_in_words(engine.pipeline.draft),
        "max_tokens": options.max_tokens,
        "repeats": options.repeats,
    }


class Progress:
    """Which run it is at: a line that is drawn anew on a terminal, elsewhere a line now and then."""

    def __init__(self, shown: bool):
        self._shown, self._terminal = shown, shown and is_terminal(sys.stderr)
        self._said = time.monotonic()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if self._terminal:
            sys.stderr.write(f"\r\x1b[2K{dim(text[: size(sys.stderr)[0] - 1])}")
            sys.stderr.flush()
        elif self._shown and now - self._said >= LOG_EVERY_S:
            self._said = now
            say(text)

    def erase(self) -> None:
        if self._terminal:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
