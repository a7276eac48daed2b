"""Let the target write the data: it is fed the opening of a user's turn and samples the question, then answers it.

Work is cut into batches, each with a random key of its own and a file of its own. A file is there whole or not at all, so a
run that was killed goes on where it stood and ends in the same data.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import mlx.core as mx
import numpy as np

from dspark.errors import InputError
from dspark.models.target import Target
from dspark.train.clean import cut_loop
from dspark.train.conversations import Conversation, chat, pack_rows, stops_of, unpack_rows, user_turn
from dspark.train.generate import Manner, write
from dspark.train.recipe import DataTable

OPENINGS = Path(__file__).parent / "prompts" / "openings.txt"
QUESTION_TEMPERATURES = (1.0, 0.8)
ANSWER_TEMPERATURES = (0.0, 0.7)
TOP_P = 0.99
# Of a time limit, what drawing questions may take.
QUESTIONS_SHARE = 0.3
SHORTEST_QUESTION = 4
SHORTEST_ANSWER = 8
Say = Callable[[str], None]


class Book(NamedTuple):
    """All data of a run: conversations to train on, and those kept apart, which are greedy answers."""

    train: list[Conversation]
    held_out: list[Conversation]


@attrs.frozen
class Writer:
    """Who writes what. `prompts` are further user turns to be answered. deadline: of `time.monotonic()`, behind which what is
    missing stays missing, for good (questions stop at QUESTIONS_SHARE of it)."""

    target: Target
    tokenizer: Any
    plan: DataTable
    folder: Path
    prompts: tuple[str, ...] = ()
    say: Say = lambda text: None
    deadline: float | None = None

    def book(self) -> Book:
        """Write what is missing on disk and read it all. Raises InputError where the folder holds another plan's data."""
        self._claim()
        now = time.monotonic()
        asked = self._asked(None if self.deadline is None else now + (self.deadline - now) * QUESTIONS_SHARE)
        train, held = self._split(asked)
        kept_apart = self._answers("held", held, (0.0,), loops=True)
        return Book(self._answers("train", train, ANSWER_TEMPERATURES, loops=False), kept_apart)

    def _wanted(self, file: Path, deadline: float | None) -> bool:
        """Whether a file is still to be written. Once time is up, a mark says that what is missing will stay so."""
        closed = self.folder / f"closed-{file.stem.split('-')[0]}"
        if file.exists() or closed.exists():
            return False
        if deadline is not None and time.monotonic() > deadline:
            closed.touch()
            self.say(f"time is up: {file.stem} and what would follow are left out")
            return False
        return True

    def _claim(self) -> None:
        """One folder holds one plan."""
        self.folder.mkdir(parents=True, exist_ok=True)
        plan = {k: v for k, v in attrs.asdict(self.plan).items() if k not in ("folder", "lengths", "prompts")}
        words = hashlib.sha256("\n".join(self.prompts).encode()).hexdigest()[:16]
        said = json.dumps({**plan, "target": self.target.name, "words": words}, sort_keys=True)
        file = self.folder / "plan.json"
        if not file.exists():
            _write(file, lambda path: path.write_text(said))
        elif file.read_text() != said:
            raise InputError(
                f"{self.folder}: it holds data of another plan or target ({file}); name another [data] folder or remove it"
            )

    def store(self, file: Path, rows: list[Conversation]) -> None:
        """Keep conversations beside the book's."""
        _write(file, lambda path: _save(path, pack_rows(rows)))

    # ---- questions --------------------------------------------------------------------------------------------------

    def _asked(self, deadline: float | None) -> list[str]:
        """Unique questions, in the order they were drawn."""
        texts = list(self.prompts)
        batches = list(self._question_batches())
        for number in self._shuffled(len(batches)):
            file = self.folder / f"questions-{number:05d}.json"
            if self._wanted(file, deadline):
                self._draw(file, number, *batches[number])
            if file.exists():
                texts += json.loads(file.read_text(encoding="utf-8"))
        seen: dict[str, None] = {}
        for text in texts:
            seen.setdefault(text.strip())
        return [text for text in seen if text]

    def _shuffled(self, count: int) -> list[int]:
        """Batches in an order that leaves an even sample when time runs out."""
        return np.random.default_rng(self.plan.seed).permutation(count).tolist()

    def _question_batches(self) -> Iterable[tuple[list[list[int]], int]]:
        plan = self.plan
        if not plan.questions:
            return
        turn = user_turn(self.tokenizer)
        begins = [line for line in OPENINGS.read_text(encoding="utf-8").split("\n") if line.strip()]
        ids = [self.tokenizer.encode(line.rstrip(), add_special_tokens=False) for line in begins]
        opened = round(plan.questions * plan.openings)
        # Both halves hold both temperatures, whose rows alternate.
        begun = [turn.opening + (list(ids[i // 2 % len(ids)]) if i < opened else []) for i in range(plan.questions)]
        order = sorted(range(plan.questions), key=lambda i: (len(begun[i]), i))
        for at in range(0, plan.questions, plan.rows):
            yield [begun[i] for i in order[at : at + plan.rows]], len(turn.opening)

    def _draw(self, file: Path, number: int, prompts: list[list[int]], shown: int) -> None:
        plan, turn = self.plan, user_turn(self.tokenizer)
        temperatures = np.array([QUESTION_TEMPERATURES[i % 2] for i in range(len(prompts))])
        key = mx.random.key(plan.seed * 1000003 + 2 * number)
        stops = stops_of(self.tokenizer, turn)
        rows = write(self.target, prompts, Manner(temperatures, TOP_P), plan.question_tokens, stops, key)
        texts = [
            self.tokenizer.decode(prompt[shown:] + row.tokens).strip()
            for prompt, row in zip(prompts, rows, strict=True)
            if row.finished and len(row.tokens) >= SHORTEST_QUESTION and len(cut_loop(row.tokens)) == len(row.tokens)
        ]
        _write(file, lambda path: path.write_text(json.dumps(texts), encoding="utf-8"))
        self.say(f"questions {number}: {len(texts)} of {len(prompts)} finished")

    # ---- answers ----------------------------------------------------------------------------------------------------

    def _split(self, asked: list[str]) -> tuple[list[list[int]], list[list[int]]]:
        """Prompts to train on and prompts kept apart: the first of a fixed shuffle, so that both are alike."""
        longest = self.plan.lengths[-1] - SHORTEST_ANSWER - 1
        prompts = [ids for ids in (chat(self.tokenizer, text) for text in asked) if len(ids) <= longest]
        if len(prompts) <= self.plan.held_out:
            raise InputError(
                f"{len(prompts)} questions are left and held_out keeps {self.plan.held_out}; ask for more questions"
            )
        order = np.random.default_rng(self.plan.seed).permutation(len(prompts)).tolist()
        picked = [prompts[i] for i in order]
        return picked[self.plan.held_out :], picked[: self.plan.held_out]

    def _answers(
        self, name: str, prompts: list[list[int]], temperatures: tuple[float, ...], loops: bool
    ) -> list[Conversation]:
        batches = []
        for place, temperature in enumerate(temperatures):
            part = sorted(prompts[place :: len(temperatures)], key=len)
            batches += [(part[at : at + self.plan.rows], temperature) for at in range(0, len(part), self.plan.rows)]
        rows: list[Conversation] = []
        for number in self._shuffled(len(batches)):
            file = self.folder / f"{name}-{number:05d}.npz"
            if self._wanted(file, None if loops else self.deadline):
                part, temperature = batches[number]
                self._answer(file, number, part, temperature, loops)
            if file.exists():
                rows += unpack_rows(np.load(file))
        return rows

    def _answer(self, file: Path, number: int, prompts: list[list[int]], temperature: float, loops: bool) -> None:
        plan, stops = self.plan, stops_of(self.tokenizer)
        salt = 2 * number + 1 + (1 << 20 if loops else 0)
        key, manner = mx.random.key(plan.seed * 1000003 + salt), Manner(np.full(len(prompts), temperature))
        written = write(self.target, prompts, manner, plan.answer_tokens, stops, key)
        kept = []
        for prompt, row in zip(prompts, written, strict=True):
            answer = row.tokens if loops else cut_loop(row.tokens)
            if row.finished and len(answer) == len(row.tokens):
                answer = [*answer, self._end()]
            if loops or len(answer) >= SHORTEST_ANSWER:
                kept.append(Conversation(prompt, answer))
        self.store(file, kept)
        cut = sum(len(row.tokens) for row in written) - sum(len(row.answer) for row in kept)
        self.say(f"{file.stem}: {len(kept)} answers, {sum(len(r.answer) for r in kept)} tokens kept, {max(cut, 0)} cut")

    def _end(self) -> int:
        """The token that an answer ends with."""
        eos = getattr(self.tokenizer, "eos_token_id", None)
        return int(eos) if eos is not None else min(int(t) for t in self.tokenizer.eos_token_ids)


def answers_to(writer: Writer, texts: Iterable[str], max_tokens: int) -> list[Conversation]:
    """Greedy answers to further prompts, for evaluation; nothing is stored."""
    prompts = [chat(writer.tokenizer, text) for text in texts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    rows = write(
        writer.target,
        [prompts[i] for i in order],
        Manner(np.zeros(len(prompts))),
        max_tokens,
        stops_of(writer.tokenizer),
        mx.random.key(0),
    )
    found = dict(zip(order, rows, strict=True))
    return [
        Conversation(prompt, [*found[i].tokens, *([writer._end()] if found[i].finished else [])])
        for i, prompt in enumerate(prompts)
    ]


def read_prompts(path: Path) -> tuple[str, ...]:
    """A text file's prompts, one a line. Raises InputError where there are none."""
    try:
        lines = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as prompts, one a line: {error}") from None
    if not lines:
        raise InputError(f"{path}: it holds no prompts; write one a line")
    return lines


def _save(path: Path, arrays: dict[str, Any]) -> None:
    with open(path, "wb") as out:
        np.savez_compressed(out, **arrays)


def _write(file: Path, make: Callable[[Path], Any]) -> None:
    """Write a file so that it is there whole or not at all."""
    part = file.with_name(file.name + ".part")
    make(part)
    os.replace(part, file)
