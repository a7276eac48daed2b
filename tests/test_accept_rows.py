"""Rows of a batch decide as if alone, with options of their own; and the log-probabilities that they report."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.errors import InputError
from dspark.stages.accept import Greedy, Rejection, SampleMatch, Sampling, by_row, row_accepts
from tests.reference import opening, verdict

WORDS = 23

# --- batches -----------------------------------------------------------------------------------------------------------


def batch(drafts: int, seed: int = 3):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1, (4, drafts + 1, WORDS)).astype(np.float32)
    tokens = np.where(rng.random((4, drafts)) < 0.7, logits[:, :drafts].argmax(-1), rng.integers(0, WORDS, (4, drafts)))
    return logits, tokens.astype(np.int32), (5, 17, 8, 30), tuple(int(n) for n in rng.integers(0, drafts + 1, 4))


MIXED = (
    Sampling(temperature=1.0, logprobs=True, top_logprobs=2).accept("rejection"),
    Sampling(repetition_penalty=1.2, presence_penalty=0.5).accept(),
    Sampling(temperature=1.0, logprobs=True, top_logprobs=2).accept("rejection"),
    Sampling(temperature=0.6, top_p=0.8, logprobs=True).accept(),
)
PROMPTS = ((1, 2, 3), (4,), tuple(range(23)), (9, 9))


def alone(stage, rounds, row, seed):
    """What a row says by itself, round after round."""
    carry, out = stage.init(opening(1, (seed,), (PROMPTS[row],))), []
    for logits, tokens, start, offered in rounds:
        one = verdict(logits[row : row + 1], tokens[row : row + 1], start[row : row + 1], offered[row : row + 1])
        acceptance, carry = stage(one, carry)
        out.append((acceptance.accepted.item(), acceptance.next.item()))
    return out


@pytest.mark.parametrize("stages", [MIXED, *((stage,) * 4 for stage in (*MIXED[:2], MIXED[3]))])
def test_a_batch_equals_its_rows(stages):
    seeds, rounds = (11, 12, 13, 14), [batch(3, 1), batch(0, 2), batch(4, 3)]
    stage = by_row(stages)
    carry, said = stage.init(opening(4, seeds, PROMPTS)), []
    for block in rounds:
        acceptance, carry = stage(verdict(*block[:3], block[3]), carry)
        said.append(list(zip(acceptance.accepted.tolist(), acceptance.next.tolist(), strict=True)))
    singles = [alone(stages[row], rounds, row, seeds[row]) for row in range(4)]
    assert [list(row) for row in zip(*said, strict=True)] == singles
    assert alone(stages[2], rounds, 2, 99) != singles[2] or isinstance(stages[2], Greedy)


@pytest.mark.parametrize("stages", [MIXED, *((stage,) * 4 for stage in (*MIXED[:2], MIXED[3]))])
def test_rows_retire_and_join(stages):
    """Rows 3 and 1 stay after a round, then row 2 arrives: each goes on as if alone."""
    seeds, first, then = (11, 12, 13, 14), batch(3, 1), batch(2, 5)
    stage = by_row(stages)
    _, carry = stage(verdict(*first[:3], first[3]), stage.init(opening(4, seeds, PROMPTS)))
    carry = stage.take(carry, [3, 1])
    if stage is stages[0]:
        carry = stage.join(carry, stage.init(opening(1, (13,), (PROMPTS[2],))))
    else:
        new = type(stage)((stages[2],))
        carry = stage.join(carry, new.init(opening(1, (13,), (PROMPTS[2],))))
    rows = [3, 1, 2]
    start, offered = ([host[r] for r in rows] for host in then[2:])
    acceptance, _ = stage(verdict(then[0][rows], then[1][rows], start, offered), carry)
    said = list(zip(acceptance.accepted.tolist(), acceptance.next.tolist(), strict=True))
    assert said == [
        alone(stages[3], [first, then], 3, 14)[1],
        alone(stages[1], [first, then], 1, 12)[1],
        alone(stages[2], [then], 2, 13)[0],
    ]


def test_by_row_of_equal_rows_is_the_stage_itself():
    assert by_row((Greedy(), Greedy())) == Greedy()
    assert row_accepts(Greedy(), 2) == (Greedy(), Greedy())
    assert row_accepts(by_row(MIXED), 4) == MIXED


def test_by_row_counts_its_rows():
    with pytest.raises(InputError, match="options for 4 rows and prompts for 2"):
        by_row(MIXED).init(opening(2))


# --- log-probabilities -------------------------------------------------------------------------------------------------


def log_softmax(logits):
    return logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))


@pytest.mark.parametrize("kind", ["greedy", "sample-match", "rejection"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_logprobs_are_those_behind_the_penalties(kind, drafts):
    """Bias counts, temperature and truncation do not. float32 sums of 23 terms: 1e-5."""
    logits, tokens, start, offered = batch(drafts)
    stage = Sampling(temperature=0.5, top_k=4, logit_bias={3: 2.0, 7: -1.5}, logprobs=True, top_logprobs=5).accept(kind)
    acceptance, _ = stage(verdict(logits, tokens, start, offered), stage.init(opening(4)))
    biased = logits.copy()
    biased[..., 3] += 2
    biased[..., 7] -= 1.5
    expected, found = log_softmax(biased), acceptance.logprobs
    for row, (count, following) in enumerate(zip(acceptance.accepted.tolist(), acceptance.next.tolist(), strict=True)):
        for i, token in enumerate([*tokens[row, :count].tolist(), following]):
            assert abs(found.chosen[row, i].item() - expected[row, i, token]) < 1e-5
            best = np.argsort(-expected[row, i])[:5]
            assert found.top_ids[row, i].tolist() == best.tolist()
            assert np.abs(np.array(found.top_values[row, i]) - expected[row, i, best]).max() < 1e-5
            assert abs(log_softmax(biased / 0.5)[row, i, token] - expected[row, i, token]) > 1e-3, "a control"


def test_logprobs_of_mixed_rows():
    """Rows that asked for fewer, or for none, hold padding that says so."""
    logits, tokens, start, offered = batch(3)
    stage = by_row(MIXED)
    acceptance, _ = stage(verdict(logits, tokens, start, offered), stage.init(opening(4, None, PROMPTS)))
    chosen, ids, values = (np.array(field) for field in acceptance.logprobs)
    assert ids.shape == values.shape == (4, 4, 2)
    assert np.isnan(chosen[1]).all()
    assert np.isfinite(chosen[[0, 2, 3]]).all()
    assert (ids[[1, 3]] == -1).all()
    assert (ids[[0, 2]] >= 0).all()


def test_no_logprobs_unless_asked_for():
    logits, tokens, start, offered = batch(3)
    for stage in (Greedy(), SampleMatch(), Rejection()):
        assert stage(verdict(logits, tokens, start, offered), stage.init(opening(4)))[0].logprobs is None


@pytest.mark.parametrize("value", [-1, 2.5, True, "3"])
def test_bad_logprobs(value):
    with pytest.raises(InputError, match="logprobs is"):
        Greedy(logprobs=value)
