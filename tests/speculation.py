"""Greedy decoding of a target, plain and drafted, for tests that compare the two."""

import random

import mlx.core as mx

from dspark.engine import bind
from dspark.pipeline import chain
from dspark.stages.accept import Greedy
from dspark.stages.draft import Lookup
from dspark.stages.prefill import Prefill
from dspark.stages.rollback import RollbackAuto
from dspark.stages.verify import Verify
from tests.fakes import ScriptedDraft


def prompts(vocab, lengths, seed=3):
    """Token lists of these lengths. The first tokens differ, so that a script finds its row."""
    chance = random.Random(seed)
    return [(row, *(chance.randrange(vocab) for _ in range(n - 1))) for row, n in enumerate(lengths)]


def plain(target, prompt, length):
    """What mlx-lm itself generates, or, for a model that it did not make, a loop of one token a forward."""
    if type(target.core).__module__.startswith("mlx_lm."):
        from mlx_lm.generate import generate_step

        return [int(t) for t, _ in generate_step(mx.array(prompt), target.core, max_tokens=length)]
    caches, out, ids = target.make_caches(), [], list(prompt)
    for _ in range(length):
        logits, _ = target(mx.array([ids]), caches)
        out.append(mx.argmax(logits[0, -1]).item())
        ids = [out[-1]]
    return out


def drafted(target, asked, truths, length, rate, rollback=None, cap=4):
    """The same through engine and session, with drafts that are true at `rate` ("lookup": from the text itself)."""
    scripts = tuple((*prompt, *truth) for prompt, truth in zip(asked, truths, strict=True))
    draft = (
        Lookup(min_ngram=1, max_ngram=2) if rate == "lookup" else ScriptedDraft(scripts, rate, vocab=target.vocab_size)
    )
    pipeline = chain(Prefill(chunk=5), draft, Verify(), Greedy(), rollback or RollbackAuto(), cap=cap)
    engine = bind(pipeline, target)
    several = [list(p) for p in asked] if len(asked) > 1 else list(asked[0])
    with engine.open(several, max_tokens=length) as session:
        list(session)
    return [list(result.tokens) for result in session.results]
