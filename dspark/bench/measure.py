"""Running the arms in turn: each prompt goes through all of them, forwards and then backwards, so that drift hits all alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import attrs

from dspark.bench.arms import Arm
from dspark.bench.record import Run
from dspark.errors import DsparkError

Told = Callable[[str], None]


@attrs.frozen
class Question:
    """A prompt as all arms get it. kind: its set; place: in the set, from 1; ids: of the tokenised prompt."""

    kind: str
    place: int
    ids: tuple[int, ...]


@attrs.define
class Measured:
    """All runs. warm: the untimed pass; timed: by arm and question, one a repeat; dropped: arms that cannot take part, and
    why; load: the machine's load average before and after, None where the system tells none."""

    questions: tuple[Question, ...]
    arms: list[str]
    warm: dict[tuple[str, Question], Run] = attrs.field(factory=dict)
    timed: dict[tuple[str, Question], list[Run]] = attrs.field(factory=dict)
    dropped: dict[str, str] = attrs.field(factory=dict)
    load: tuple[float, float] | None = None

    def runs(self, arm: str, question: Question) -> list[Run]:
        """Every answer, the untimed one first."""
        return [self.warm[arm, question], *self.timed.get((arm, question), [])]

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(question.kind for question in self.questions))

    def of(self, kind: str) -> tuple[Question, ...]:
        return tuple(question for question in self.questions if question.kind == kind)


def measure(arms: Sequence[Arm], questions: Sequence[Question], repeats: int, max_tokens: int, told: Told) -> Measured:
    """One untimed pass of every arm over every prompt, then `repeats` timed ones, the arms of a prompt side by side.

    An arm other than the first that fails in the untimed pass is dropped, with its reason; the first one's errors are raised,
    and so is any that comes later.
    """
    found = Measured(tuple(questions), [arm.name for arm in arms])
    before = _load()
    alive = list(arms)
    for question in questions:
        for arm in list(alive):
            told(f"untimed pass: {question.kind} {question.place}, {arm.name}")
            try:
                found.warm[arm.name, question] = arm.run(question.ids, max_tokens)
            except Exception as error:
                if arm is arms[0]:
                    raise
                found.dropped[arm.name] = _sentence(arm.name, error)
                alive.remove(arm)
    found.arms, total = [arm.name for arm in alive], len(alive) * len(questions) * repeats
    for number, (arm, question, repeat) in enumerate(schedule(alive, questions, repeats), 1):
        told(f"run {number} of {total}: {question.kind} {question.place}, {arm.name}, repeat {repeat}")
        found.timed.setdefault((arm.name, question), []).append(arm.run(question.ids, max_tokens))
    found.load = None if before is None else (before, _load() or before)
    return found


def schedule(arms: Sequence[Arm], questions: Sequence[Question], repeats: int) -> Iterator[tuple[Arm, Question, int]]:
    """A B C for one prompt, C B A for the next; in the next repeat the other way round. Repeats count from 1."""
    for repeat in range(repeats):
        for place, question in enumerate(questions):
            turn = arms if (repeat + place) % 2 == 0 else arms[::-1]
            for arm in turn:
                yield arm, question, repeat + 1


def _sentence(name: str, error: Exception) -> str:
    text = " ".join(str(error).split()) or "no reason given"
    if isinstance(error, DsparkError):
        return text.removeprefix(f"{name}: ")[:300]
    return f"{type(error).__name__}: {text[:300]}"


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None
