"""Sampling: the options that users know, as one plain record, and the accept stage that they mean."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import attrs

from dspark.errors import InputError, did_you_mean
from dspark.stages.accept.base import AbstractSampler
from dspark.stages.accept.greedy import Greedy
from dspark.stages.accept.match import SampleMatch
from dspark.stages.accept.rejection import Rejection
from dspark.stages.warp import (
    FrequencyPenalty,
    LogitBias,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
    Warps,
    warps,
)
from dspark.stages.warp.base import whole

KINDS: dict[str, type[AbstractSampler]] = {"greedy": Greedy, "sample-match": SampleMatch, "rejection": Rejection}


@attrs.frozen
class Sampling:
    """How a token is chosen. Raises InputError, one sentence, for a value that makes no sense.

    Order of the chain, as mlx_lm applies it: logit bias, repetition, presence and frequency penalty, then top-p, min-p
    and top-k on the distribution at temperature 1, and the temperature last. With equal options the distribution is that
    of mlx_lm's make_logits_processors and make_sampler; presence and frequency penalties count over the answer, as OpenAI
    defines them, where mlx_lm looks at the last 20 tokens. Temperature 0, top_p 0 and top_k 1 mean greedy decoding.

    temperature at least 0; top_p and min_p 0 to 1; top_k 0 for off; logit_bias: token id to number; repetition_penalty 1
    for off, over the last `repetition_context` tokens, prompt included; logprobs: report log-probabilities of the
    chosen tokens, and of the top_logprobs likeliest ones.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    repetition_penalty: float = 1.0
    repetition_context: int = 20
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: bool = False
    top_logprobs: int = attrs.field(default=0, validator=whole("top_logprobs", 0))

    @cached_property
    def chain(self) -> Warps:
        """The links, in order; making them checks the values."""
        return warps(
            LogitBias(self.logit_bias or {}),
            RepetitionPenalty(self.repetition_penalty, self.repetition_context),
            PresencePenalty(self.presence_penalty),
            FrequencyPenalty(self.frequency_penalty),
            TopP(self.top_p),
            MinP(self.min_p),
            TopK(self.top_k),
            Temperature(self.temperature),
        )

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.logprobs, bool):
            raise InputError(f"logprobs is {self.logprobs!r}; it must be true or false")
        if self.top_logprobs and not self.logprobs:
            raise InputError(f"top_logprobs is {self.top_logprobs} but logprobs is off; turn logprobs on")
        _ = self.chain

    @property
    def is_greedy(self) -> bool:
        return self.chain.is_greedy

    def accept(self, kind: str = "auto", q_known: bool = False) -> AbstractSampler:
        """The stage for these options. "auto": Greedy where they are greedy, else Rejection where the drafter says what it
        drew from (`q_known`), else SampleMatch; "greedy", "sample-match" and "rejection" force one.

        Links that change nothing are left out of the stage's chain, and Greedy's holds penalties and biases alone.
        """
        if kind == "auto":
            kind = "greedy" if self.is_greedy else "rejection" if q_known else "sample-match"
        if kind not in KINDS:
            allowed = ("auto", *KINDS)
            raise InputError(
                f"accept kind is {kind!r}; allowed: {', '.join(sorted(allowed))}{did_you_mean(kind, allowed)}"
            )
        links = [link for link in self.chain.links if not link.is_identity and (link.reorders or kind != "greedy")]
        return KINDS[kind](warps(*links), self.top_logprobs if self.logprobs else None)
