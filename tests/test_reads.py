"""One device read a round, greedy and sampled; what a round builds and calls, counted and not timed."""

import io
import sys
from pathlib import Path

import mlx.core as mx
import pytest

import dspark.round as round_module
from benchmarks.round import measure
from dspark.engine import bind
from dspark.pipeline import chain
from dspark.stages.accept import Greedy, Sampling
from dspark.stages.draft import Lookup, NoDraft, first_of
from dspark.stages.prefill import Prefill
from dspark.stages.rollback import Checkpoint, KvTrim
from dspark.stages.verify import Verify
from tests.fakes import HashTarget, ScriptedDraft, plain

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
SAMPLINGS = {
    "greedy": Sampling(),
    "match": Sampling(temperature=0.7, top_k=10, top_p=0.9),
    "penalties": Sampling(temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.1),
    "logprobs": Sampling(temperature=0.7, logprobs=True, top_logprobs=3),
}


def drafts():
    truth = PROMPT + tuple(plain(HashTarget(), PROMPT, 80))
    scripted = ScriptedDraft((truth,), 0.6)
    return {"none": NoDraft(), "lookup": Lookup(min_ngram=1), "hybrid": first_of(Lookup(min_ngram=1), scripted)}


class Reads:
    """Counts evaluations (which wait for the device), and notes who takes values from arrays."""

    def __init__(self, monkeypatch):
        self.evals, self.taken = 0, set()
        evaluate = mx.eval

        def counted(*arrays):
            self.evals += 1
            return evaluate(*arrays)

        monkeypatch.setattr(mx, "eval", counted)
        for name in ("tolist", "item"):
            monkeypatch.setattr(mx.array, name, self._noted(getattr(mx.array, name)))

    def _noted(self, method):
        def noted(array):
            self.taken.add(Path(sys._getframe(1).f_code.co_filename).name)
            return method(array)

        return noted


@pytest.mark.parametrize("rollback", [KvTrim(), Checkpoint()])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("draft", ["none", "lookup", "hybrid"])
def test_a_round_reads_the_device_once(draft, sampling, rollback, monkeypatch):
    engine = bind(chain(Prefill(), drafts()[draft], Verify(), Greedy(), rollback), HashTarget())
    session = engine.open(PROMPT, max_tokens=60, sampling=SAMPLINGS[sampling], seed=1)
    session.step()
    reads, rounds = Reads(monkeypatch), 0
    while session.result.finish is None and rounds < 12:
        session.step()
        rounds += 1
    assert reads.evals == rounds
    assert reads.taken == {"round.py"}, "values are taken where the read is, and nowhere else"


def test_a_second_read_is_counted(monkeypatch):
    def read_twice(acceptance):
        mx.eval(acceptance.next)
        acceptance.next.tolist()
        return right(acceptance)

    right = round_module.read
    monkeypatch.setattr(round_module, "read", read_twice)
    session = bind(chain(Prefill(), NoDraft(), Verify(), Greedy(), KvTrim()), HashTarget()).open(PROMPT, max_tokens=9)
    session.step()
    reads = Reads(monkeypatch)
    session.step()
    assert reads.evals == 2
    assert "test_reads.py" in reads.taken


# ---- the cost of a round, counted -----------------------------------------------------------------------------------


class Calls:
    """Counts Python functions entered outside the target and the drafter."""

    def __init__(self):
        self.python = self._inside = 0

    def __enter__(self):
        sys.setprofile(self._see)
        return self

    def __exit__(self, *exc):
        sys.setprofile(None)

    def _see(self, frame, event, called):
        if event in ("call", "return") and frame.f_code.co_filename.endswith("fakes.py"):
            self._inside += 1 if event == "call" else -1
        elif event == "call" and not self._inside:
            self.python += 1


def operations(arrays):
    """MLX operations that these arrays still need, the target's own included."""
    drawn = io.StringIO()
    mx.export_to_dot(drawn, *[a for a in arrays if a is not None])
    return drawn.getvalue().count("shape=rectangle")


def cost(monkeypatch, draft, sampling, rounds=10, sinks=()):
    """(Python calls, MLX operations) a round, the most of several rounds."""
    engine = bind(chain(Prefill(), draft, Verify(), Greedy(), KvTrim()), HashTarget())
    session = engine.open(PROMPT, max_tokens=80, sampling=sampling, seed=1, sinks=sinks)
    session.step()
    worst, send = (0, 0), mx.async_eval
    for _ in range(rounds):
        sent = []
        monkeypatch.setattr(
            mx, "async_eval", lambda *arrays, sent=sent: sent.append(operations(arrays)) or send(*arrays)
        )
        with Calls() as calls:
            session.step()
        own = 3  # what this function adds: the lambda, `operations` and its list
        worst = max(worst[0], calls.python - own), max(worst[1], *sent)
    return worst


LIMITS = {"greedy": (40, 75), "match": (56, 120), "penalties": (62, 170), "logprobs": (66, 120)}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_round_calls_no_more_than_it_did(sampling, monkeypatch):
    truth = PROMPT + tuple(plain(HashTarget(), PROMPT, 80))
    python, built = cost(monkeypatch, ScriptedDraft((truth,), 0.6), SAMPLINGS[sampling])
    most_python, most_built = LIMITS[sampling]
    assert python <= most_python
    assert 20 < built <= most_built


def test_a_round_that_builds_more_is_caught(monkeypatch):
    def wasteful(self, verdict, carry):
        acceptance, carry = right(self, verdict, carry)
        following = acceptance.next
        for _ in range(20):
            following = following + 0
        return acceptance._replace(next=following), carry

    right = Greedy.__call__
    monkeypatch.setattr(Greedy, "__call__", wasteful)
    truth = PROMPT + tuple(plain(HashTarget(), PROMPT, 80))
    assert cost(monkeypatch, ScriptedDraft((truth,), 0.6), SAMPLINGS["greedy"])[1] > LIMITS["greedy"][1]


def test_a_round_that_calls_more_is_caught(monkeypatch):
    truth = PROMPT + tuple(plain(HashTarget(), PROMPT, 80))
    noisy = [lambda event: [str(i) for i in range(3)] and [f() for f in [lambda: 0] * 100]]
    assert cost(monkeypatch, ScriptedDraft((truth,), 0.6), SAMPLINGS["greedy"], sinks=noisy)[0] > LIMITS["greedy"][0]


def test_the_benchmark_of_a_round_still_fits_the_round():
    """`make bench` swaps functions of the round for stand-ins by name: a renamed one must be noticed here."""
    read = round_module.read
    a_round_s, an_iteration_s = measure(rounds=2, repeats=2)
    assert a_round_s > 0 < an_iteration_s
    assert round_module.read is read
