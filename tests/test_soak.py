"""The promise: 20,000 rounds on a hybrid leave memory where it was, owe less than a bound, and say what plain decoding says."""

import gc

import mlx.core as mx
import pytest

from dspark.buffers.single import MAX_OWED
from dspark.engine import bind
from dspark.models.target import Target
from dspark.pipeline import chain
from dspark.stages.accept import Greedy
from dspark.stages.prefill import Prefill
from dspark.stages.rollback import Checkpoint, RollbackAuto
from dspark.stages.verify import Verify
from tests.fakes import ScriptedDraft
from tests.families import build
from tests.speculation import plain, prompts

CAP = 4


def soak(rounds, length):
    """Run sessions until so many rounds are done; the active memory behind each, in bytes."""
    target = Target(build("qwen3_5", hidden_size=32, intermediate_size=32, max_position_embeddings=4096))
    (prompt,) = prompts(256, (6,))
    truth = plain(target, prompt, length)
    assert len(set(truth)) > 24
    done, session_number, memory, owed = 0, 0, [], []
    while done < rounds:
        draft = ScriptedDraft(((*prompt, *truth),), 0.4, seed=session_number, vocab=256)
        rollback = Checkpoint() if session_number % 2 else RollbackAuto()
        engine = bind(chain(Prefill(), draft, Verify(), Greedy(), rollback, cap=CAP), target)
        with engine.open(list(prompt), max_tokens=length, sinks=[lambda e: owed.append(e.owed_tokens)]) as session:
            for _ in session:
                pass
        assert list(session.result.tokens) == truth
        done += session.result.rounds
        session_number += 1
        del session, engine
        gc.collect()
        mx.clear_cache()
        memory.append(mx.get_active_memory())
    assert 0 < max(owed) <= MAX_OWED + CAP + 1
    return memory


@pytest.mark.slow
def test_twenty_thousand_rounds_leave_memory_where_it_was():
    memory = soak(20_000, 1600)
    assert len(memory) > 10
    assert max(memory[2:]) <= memory[1] + 4096


def test_some_rounds_of_the_soak():
    assert len(soak(100, 120)) >= 2
