"""Prefill: a long context is read in shorter pieces where attention holds its scores, and nothing else changes."""

from __future__ import annotations

import mlx.core as mx
import pytest

from dspark.pipeline import chain
from dspark.stages import prefill
from dspark.stages.accept import Greedy
from dspark.stages.draft import NoDraft
from dspark.stages.prefill import FEWEST_ROWS, MOST_SCORES, Prefill, rows_for
from dspark.stages.rollback import KvTrim
from dspark.stages.verify import Verify
from tests.fakes import HashTarget


@pytest.mark.parametrize("held", [0, 10_000, 16_000, 50_000, 200_000, 1_000_000])
def test_scores_stay_within_bounds(held, monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    rows = rows_for(2048, held)
    assert rows == FEWEST_ROWS or rows * (held + rows) <= MOST_SCORES
    # No shorter than it must be.
    assert rows == 2048 or 2 * rows * (held + 2 * rows) > MOST_SCORES
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert rows_for(2048, held) == 2048


def test_a_small_chunk_stays():
    assert rows_for(64, 10**9) == 64


def said(engine, prompt):
    with engine.open(prompt, max_tokens=8) as session:
        return [token for commit in session for token in commit.tokens]


def test_shorter_pieces_read_the_same_prompt(monkeypatch):
    """Widths shrink with the context, every token is fed once and in order, and the text is that of one piece."""
    from dspark import bind

    prompt = tuple(range(3, 63))
    pipe = chain(Prefill(chunk=32), NoDraft(), Verify(), Greedy(), KvTrim())
    whole = said(bind(pipe, HashTarget()), prompt)
    monkeypatch.setattr(prefill, "MOST_SCORES", 32 * 40)
    monkeypatch.setattr(prefill, "FEWEST_ROWS", 4)
    target, widths = HashTarget(), []
    call = HashTarget.__call__
    monkeypatch.setattr(
        HashTarget, "__call__", lambda self, ids, *a, **k: (widths.append(ids.shape[1]), call(self, ids, *a, **k))[1]
    )
    engine = bind(pipe, target)
    widths.clear()
    assert said(engine, prompt) == whole
    read = [w for w in widths if w > 1]
    assert sum(read) in (59, 60)
    assert read[0] == 32
    assert len(read) > 2
    assert read == sorted(read, reverse=True)
