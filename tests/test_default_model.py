"""The default model itself, as a newcomer has it: lookup changes no token, on MLX's bundled BLAS. Fetches it once (98 MB)."""

import attrs
import mlx_lm
import pytest

import dspark
from dspark.buffers.single import SingleBuffers

CHAT = "Why do leaves turn red in autumn?"
COPY = "Repeat this list, then continue it with four more: apple 1, pear 2, plum 3, fig 4, grape 5, melon 6."
LENGTH = 64

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine():
    """The default model, drafted for by lookup; tests/test_built_in_drafters.py has its drafters."""
    bound = dspark.load("smollm2-135m").bind(probe=False, calibration="off")
    lookup = attrs.evolve(bound.pipeline, draft=dspark.Lookup(), cap=dspark.FixedCap(32))
    return attrs.evolve(bound, pipeline=lookup)


def answer(engine, prompt):
    with engine.open(prompt, max_tokens=LENGTH) as session:
        list(session)
    return session.result


def plain(engine, prompt):
    return answer(attrs.evolve(engine, pipeline=attrs.evolve(engine.pipeline, draft=dspark.NoDraft())), prompt)


@pytest.mark.parametrize("prompt", [CHAT, COPY])
def test_lookup_says_what_plain_decoding_says(engine, prompt):
    drafted, alone = answer(engine, prompt), plain(engine, prompt)
    assert drafted.tokens == alone.tokens
    assert drafted.text == alone.text
    ids = engine.encode(prompt)
    theirs = mlx_lm.stream_generate(engine.target.model, engine.tokenizer, list(ids), max_tokens=LENGTH)
    assert drafted.text == "".join(said.text for said in theirs)


def test_copying_accepts_long_drafts(engine):
    assert answer(engine, COPY).accepted_length > 2


def test_an_answer_without_rollback_is_caught(engine, monkeypatch):
    def settle(self, keep, fed):
        held = self.held[0] - self._armed[0].width + keep[0]
        right(self, (self._armed[0].width,), fed)
        self.held = (held,)

    right, alone = SingleBuffers.settle, plain(engine, COPY)
    monkeypatch.setattr(SingleBuffers, "settle", settle)
    assert answer(engine, COPY).tokens != alone.tokens
