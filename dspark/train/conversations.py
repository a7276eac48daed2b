"""Conversations as token ids, and the two sides of a chat template around a user's turn."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dspark.errors import InputError
from dspark.prompt import encode, has_template

MARK = "\u00a7question\u00a7"


class Conversation(NamedTuple):
    """A prompt, chat template included, and the target's answer, its stop token included where it came to one."""

    prompt: list[int]
    answer: list[int]


class Turn(NamedTuple):
    """What a template puts in front of a user's words and behind them, as tokens."""

    opening: list[int]
    closing: list[int]


def user_turn(tokenizer: Any) -> Turn:
    """Both sides of a user turn. Raises InputError for a target without a chat template."""
    if not has_template(tokenizer):
        raise InputError("this target has no chat template, so it cannot write both sides; give [data] prompts instead")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARK}], add_generation_prompt=True, tokenize=False
    )
    before, mark, behind = text.partition(MARK)
    if not mark:
        raise InputError("this target's chat template changes the user's words; give [data] prompts instead")
    ids = lambda part: [int(t) for t in tokenizer.encode(part, add_special_tokens=False)]
    return Turn(ids(before), ids(behind))


def stops_of(tokenizer: Any, turn: Turn | None = None) -> tuple[int, ...]:
    """Tokens that end an answer; with `turn` also the one that ends a user's turn."""
    stops = {int(t) for t in tokenizer.eos_token_ids}
    if turn is not None and turn.closing:
        stops.add(turn.closing[0])
    return tuple(sorted(stops))


def chat(tokenizer: Any, text: str) -> list[int]:
    """A user's words through the template."""
    return list(encode(tokenizer, text))


def pack_rows(rows: list[Conversation]) -> dict[str, np.ndarray]:
    """Arrays to store: all tokens in a row, and the lengths."""
    tokens = [t for row in rows for part in row for t in part]
    return {
        "tokens": np.array(tokens, np.uint32),
        "prompts": np.array([len(row.prompt) for row in rows], np.uint32),
        "answers": np.array([len(row.answer) for row in rows], np.uint32),
    }


def unpack_rows(arrays: Any) -> list[Conversation]:
    """The conversations of stored arrays."""
    tokens, at, rows = arrays["tokens"].tolist(), 0, []
    for prompt, answer in zip(arrays["prompts"].tolist(), arrays["answers"].tolist(), strict=True):
        rows.append(Conversation(tokens[at : at + prompt], tokens[at + prompt : at + prompt + answer]))
        at += prompt + answer
    return rows
