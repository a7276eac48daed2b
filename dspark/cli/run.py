"""`dspark run`: a recipe answers a prompt."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any

import attrs

from dspark.blas import open_blas
from dspark.cli.choose import choose, sort_out
from dspark.cli.failures import FAILURE, INTERRUPTED, OK, say
from dspark.cli.inputs import read_prompt
from dspark.cli.interrupt import Interrupts
from dspark.cli.options import RunOptions
from dspark.cli.screen import Answer, Screen, dim, hushed, make_screen, short
from dspark.records import RoundEvent
from dspark.rows import Result
from dspark.telemetry.panel import Facts
from dspark.telemetry.sinks import JsonLines
from dspark.telemetry.summary import as_dict, summary


class Last:
    """A sink that remembers the latest event and the largest cap; that of the last rounds is cut to what may still come."""

    event: RoundEvent | None = None
    cap = 0

    def __call__(self, event: RoundEvent) -> None:
        self.event, self.cap = event, max(self.cap, event.cap)


@attrs.frozen
class Ran:
    """What a run left behind. last: what its rounds were like; signalled: the exit code that a signal asks for, or None."""

    recipe: Any
    engine: Any
    seed: int
    result: Result
    last: Last
    signalled: int | None


def run(options: RunOptions) -> int:
    """Answer and return the exit code. What is wrong is raised as an exception with one sentence."""
    options = sort_out(options)
    if options.batch is not None:
        from dspark.cli.batch import run_batch

        return run_batch(options)
    prompt = read_prompt(options)
    answer = Answer()
    events = None if options.events is None else JsonLines(options.events)
    screen = make_screen(
        answer, options.live, options.quiet, Facts(short(str(options.target or options.recipe))), not options.json
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(events or contextlib.nullcontext())
        stack.enter_context(hushed(screen))
        stack.enter_context(screen)
        ran = _answer(options, prompt, screen, events)
    if options.json:
        answer.write(json.dumps(_report(options, ran), ensure_ascii=False) + "\n")
    else:
        answer.end(ran.result.text)
    if not options.quiet:
        _summarise(ran)
    return _exit_code(ran, events)


def _answer(options: RunOptions, prompt: Any, screen: Screen, events: JsonLines | None) -> Ran:
    open_blas()
    from dspark.assemble import assemble
    from dspark.cli.calibrated import calibrated
    from dspark.cli.overrides import load_recipe
    from dspark.session import SessionOptions
    from dspark.stages.keys import fresh_seed

    recipe = load_recipe(choose(options, screen.note))
    screen.load(f"loading {short(recipe.target.source or 'the target')}")
    engine = assemble(recipe, progress=screen.download, say=screen.load, probe=not options.no_probe)
    for note in engine.notes:
        screen.note(note)
    recipe, engine = calibrated(recipe, engine, screen, not options.no_calibrate)
    seed = fresh_seed() if recipe.sampling.seed is None else recipe.sampling.seed
    last = Last()
    session = engine.open(
        prompt,
        max_tokens=int(options.max_tokens),
        seed=seed,
        stop=options.stop or (),
        options=SessionOptions(sinks=[s for s in (last, events, screen) if s], progress=screen.prefill),
    )
    facts = Facts(engine.target.name, draft_in_words(engine.pipeline.draft), engine.context_length)
    screen.opened(facts)
    leave = lambda: _leave(screen)
    with session, Interrupts(session.cancel, leave) as interrupts:
        for commit in session:
            if not options.json:
                screen.text(commit.text)
    return Ran(recipe, engine, seed, session.result, last, interrupts.exit_code)


def draft_in_words(draft: Any) -> str:
    """`lookup, then dspark`"""
    from dspark.stages.registry import kind_of

    if branches := getattr(draft, "branches", ()):
        return ", then ".join(draft_in_words(branch) for branch in branches)
    written = type(draft.written)
    return kind_of("draft", written) or written.__name__


def _leave(screen: Screen) -> None:
    """The second Ctrl-C: show what there is and be gone, whatever the device is doing."""
    with contextlib.suppress(Exception):
        screen.stop()
        sys.stdout.flush()
    os._exit(INTERRUPTED)


def _summarise(ran: Ran) -> None:
    if sys.stderr.isatty() and sys.stdout.isatty():
        sys.stderr.write("\n")
    for line in summary(ran.result):
        sys.stderr.write(dim(line) + "\n")


def _exit_code(ran: Ran, events: JsonLines | None) -> int:
    if ran.signalled:
        return ran.signalled
    if ran.result.finish == "error":
        say(f"dspark: {ran.result.error}")
        return FAILURE
    if events is not None and events.problem:
        say(f"dspark: {events.problem}")
        return FAILURE
    return OK


def _report(options: RunOptions, ran: Ran) -> dict[str, Any]:
    """What `--json` prints."""
    from dspark.platform import machine

    here, event = machine(), ran.last.event
    return {
        **as_dict(ran.result),
        "seed": ran.seed,
        "recipe": ran.recipe.path or options.recipe,
        "target": ran.engine.target.name,
        "drafter": draft_in_words(ran.engine.pipeline.draft),
        "cap": ran.last.cap,
        "cap_reason": event.cap_reason if event else None,
        "context_length": ran.engine.context_length,
        "memory_bytes": event.memory_bytes if event else None,
        "changes": [{"key": c.key, "old": c.old, "new": c.new, "source": c.source} for c in ran.recipe.changes],
        "notes": list(ran.engine.notes),
        "machine": {"id": here.id, **here._asdict()},
        "versions": versions(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def versions() -> dict[str, str]:
    """Versions of what an answer depends on."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from dspark import __version__

    found = {"dspark": __version__, "python": platform.python_version()}
    for name in ("mlx", "mlx-lm", "mlx-vlm", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found
