"""Write a drafter: propose the most frequent follower of each token seen so far. Recipes can say kind = "bigram" then."""

from collections import Counter, defaultdict

import attrs
import mlx.core as mx

import dspark
from dspark.records import Proposal
from dspark.stages.base import no_proposal


@dspark.register_draft("bigram")
@attrs.frozen
class Bigram(dspark.AbstractDraft):
    """Costs no forward. Carry, a row: the tokens so far and how often each followed which."""

    needs = frozenset({"host_tokens"})
    sources = ("bigram",)

    def init(self, opening):
        return tuple(([], defaultdict(Counter)) for _ in opening.prompts)

    def skip(self, settled, carry):
        for (seen, table), tokens, end in zip(carry, settled.tokens, settled.start, strict=True):
            for token in tokens[len(tokens) - (end + 1 - len(seen)) :] if end + 1 > len(seen) else ():
                if seen:
                    table[seen[-1]][token] += 1
                seen.append(token)
        return carry

    def __call__(self, settled, carry, cap):
        carry = self.skip(settled, carry)
        guesses = [table[seen[-1]].most_common(1)[:cap] for seen, table in carry]
        if not all(guesses):
            return no_proposal(settled), carry
        tokens = mx.array([[best] for [(best, _)] in guesses])
        rows = len(carry)
        return Proposal(settled.anchor, tokens, (1,) * rows, None, ("bigram",) * rows, settled.start), carry
