"""`dspark train`: make a drafter by a training recipe, and tell how it goes on standard error."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from dspark.blas import open_blas
from dspark.cli.bench import Progress
from dspark.cli.failures import INTERRUPTED, OK, say
from dspark.errors import InputError


def train(recipe: str, resume: bool, dry_run: bool, pack: int | None, seconds: float | None) -> int:
    """Run the recipe and return the exit code: 130 where Ctrl-C stopped it, which saves what has been learnt."""
    for name, given in (("--resume", resume), ("--dry-run", dry_run), ("--seconds", seconds is not None)):
        if pack is not None and given:
            raise InputError(f"--pack packs a finished drafter and does nothing else; drop {name}")
    if seconds is not None and not seconds > 0:
        raise InputError(f"--seconds {seconds:g}: give a time above 0")
    open_blas()
    from dspark import train as training
    from dspark.train.loop import Report

    progress = Progress(True)

    def line(text: str) -> None:
        progress.erase()
        if dry_run:
            sys.stdout.write(f"{text}\n")
        else:
            say(text)

    def step(number: int, total: int, metrics: dict[str, float]) -> None:
        progress(step_in_words(number, total, metrics))

    with _interrupts() as caught:
        try:
            report = Report(line, step)
            training.train(recipe, resume=resume, dry_run=dry_run, pack=pack, seconds=seconds, report=report)
        finally:
            progress.erase()
    return INTERRUPTED if caught else OK


def step_in_words(number: int, total: int, metrics: dict[str, float]) -> str:
    """A line for the steps behind us."""
    told = [f"step {number} of {total}", f"loss {metrics['loss']:.3f}", f"{metrics['hit']:.1%} of labels first"]
    return ", ".join([*told, f"{metrics['blocks_per_s']:.0f} blocks a second"])


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """The SIGINTs that came. Each still raises KeyboardInterrupt: training keeps it to itself once it has saved."""
    caught: list[int] = []

    def note(number: int, frame: Any) -> None:
        caught.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)
