"""Sampling written down once more, in float64 numpy and without any of dspark's code, and a driver for accept stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from dspark.records import Acceptance, Opening, Proposal, Verdict

Table = Callable[[int, int], np.ndarray]


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def distribution(
    logits: np.ndarray, temperature: float = 1, top_p: float = 1, top_k: int = 0, min_p: float = 0
) -> np.ndarray:
    """top-p, min-p and top-k at temperature 1, in this order, then the temperature; one row [V] of logits without ties."""
    logits = logits.astype(np.float64)
    order = np.argsort(-logits)
    probs = softmax(logits)[order]
    keep = np.cumsum(probs) - probs < top_p
    keep &= probs >= min_p * probs[0]
    if top_k:
        keep[top_k:] = False
    kept = np.full(len(logits), -np.inf)
    kept[order[keep]] = logits[order[keep]]
    return softmax(kept / temperature)


def chi_square_score(counts: np.ndarray, expected: np.ndarray) -> float:
    """How far counts [..., V] are from expected frequencies, in standard deviations of a normal variable
    (Wilson and Hilferty's cube root); 0 for typical, above 4 about once in 30,000. A token that cannot come scores inf."""
    counts, expected = counts.reshape(-1, counts.shape[-1]), expected.reshape(-1, expected.shape[-1])
    if counts[expected == 0].any():
        return np.inf
    total = counts.sum(-1, keepdims=True) * expected
    use = total > 0
    statistic = ((counts - total)[use] ** 2 / total[use]).sum()
    freedom = use.sum() - (counts.sum(-1) > 0).sum()
    if freedom == 0:
        return 0.0
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom))


def opening(
    rows: int, seeds: Sequence[int] | None = None, prompts: Any = None, vocab_size: int | None = None
) -> Opening:
    prompts = prompts or ((1,),) * rows
    return Opening(SimpleNamespace(vocab_size=vocab_size), prompts, tuple(range(rows) if seeds is None else seeds))


def verdict(
    logits: Any, tokens: Any, start: Sequence[int], offered: Sequence[int] | None = None, q: Any = None
) -> Verdict:
    tokens = mx.array(tokens, dtype=mx.int32) if not isinstance(tokens, mx.array) else tokens
    rows, drafts = tokens.shape
    counts = (drafts,) * rows if offered is None else tuple(offered)
    anchor = mx.zeros((rows, 1), dtype=mx.int32)
    return Verdict(Proposal(anchor, tokens, counts, q, ("test",) * rows, tuple(start)), mx.array(logits), None)


def decode(
    accept: Any,
    table: Table,
    prompt: Sequence[int],
    length: int,
    draft: Callable[[list[int], int], list[int]] | None = None,
    seed: int = 7,
    on_round: Callable[[Acceptance], None] | None = None,
) -> list[int]:
    """The answer that an accept stage gives for a scripted target: table(position, last token) -> logits [V] of the token
    at that position. `draft(text, round)` proposes tokens behind the text; None decodes plainly."""
    text, carry, rounds = list(prompt), accept.init(opening(1, (seed,), (tuple(prompt),))), 0
    while len(text) < len(prompt) + length:
        drafts = draft(text, rounds) if draft else []
        line = [text[-1], *drafts]
        logits = np.stack([table(len(text) + i, token) for i, token in enumerate(line)])[None]
        tokens = mx.array([drafts], dtype=mx.int32) if drafts else mx.zeros((1, 0), mx.int32)
        acceptance, carry = accept(verdict(logits.astype(np.float32), tokens, (len(text) - 1,)), carry)
        if on_round:
            on_round(acceptance)
        text += [*drafts[: acceptance.accepted.item()], acceptance.next.item()]
        rounds += 1
    return text[len(prompt) : len(prompt) + length]


def scripted_table(vocab_size: int, scale: float = 2.0, seed: int = 0, period: int = 97) -> Table:
    """Logits that depend on the position and on the token before it."""
    by_position, by_token = np.random.default_rng(seed).normal(0, scale, (2, max(period, vocab_size), vocab_size))
    return lambda position, token: by_position[position % period] + by_token[token]


def scripted_drafts(
    answer: Sequence[int], prompt_size: int, drafts: int, rate: float, vocab_size: int, seed: int = 0
) -> Any:
    """Propose what the answer will say, each token wrong with probability 1 - rate."""
    rng = np.random.default_rng(seed)

    def draft(text: list[int], round_: int) -> list[int]:
        at = len(text) - prompt_size
        ahead = [*answer[at : at + drafts], *[0] * drafts][:drafts]
        return [t if rng.random() < rate else (t + 1 + int(rng.integers(vocab_size - 1))) % vocab_size for t in ahead]

    return draft
