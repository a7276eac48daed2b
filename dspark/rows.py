"""What a session knows of one prompt: its request, its transcript, its counts, and the result that comes of them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import attrs

from dspark.records import RowCommit, TokenLogprobs, Tokens, new
from dspark.transcript import Transcript


@attrs.frozen
class Request:
    """One prompt and how to answer it. prompt: token ids; accept: the stage that decides; seed: of its random keys."""

    prompt: Tokens
    accept: Any
    seed: int
    max_tokens: int = 256
    stops: tuple[str, ...] = ()


@attrs.frozen
class Result:
    """How a row went. Times in seconds; tokens include a stop token, text does not.

    rounds: target forwards of the answer; offered_tokens, accepted_tokens: drafts shown to the target, and committed;
    by_position: for each draft position, (offered, accepted) rounds; by_source: rounds by who drafted; cached_tokens:
    prompt tokens that were in the caches already; ttft_s: from opening to the first token; decode_s: from the end of
    prefill to the last token.
    """

    tokens: Tokens
    text: str
    finish: str | None
    prompt_tokens: int
    cached_tokens: int
    rounds: int
    offered_tokens: int
    accepted_tokens: int
    by_position: tuple[tuple[int, int], ...]
    by_source: Mapping[str, int]
    prefill_s: float
    ttft_s: float
    decode_s: float
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None

    @property
    def generated_tokens(self) -> int:
        return len(self.tokens)

    @property
    def accepted_length(self) -> float:
        """Tokens a round, the bonus included."""
        return len(self.tokens) / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts of those offered."""
        return self.accepted_tokens / self.offered_tokens if self.offered_tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed from the end of prefill on."""
        return len(self.tokens) / self.decode_s if self.decode_s > 0 else 0.0


class Row:
    """A live prompt. Changed by the session only."""

    def __init__(self, index: int, request: Request, transcript: Transcript):
        self.index, self.request, self.transcript = index, request, transcript
        self.cached_tokens = 0
        self._opened = self._prefilled = self._first = self._ended = 0.0
        self._rounds: Counter[tuple[str, int, int]] = Counter()
        self._logprobs: list[TokenLogprobs] = []
        self.error: str | None = None

    @property
    def context(self) -> Tokens:
        """Every committed token, the prompt's included; the last one is not in the caches."""
        return self.request.prompt + tuple(self.transcript.tokens)

    def opened(self) -> None:
        self._opened = self._prefilled = perf_counter()

    def prefilled(self) -> None:
        self._prefilled = perf_counter()

    def commit(self, said: list[int], accepted: int, offered: int, source: str) -> RowCommit:
        """Take a round's tokens, of which a draft of `source` said `accepted`, and count it. A row that failed ends: nothing
        of the round is shown."""
        transcript = self.transcript
        if self.error is not None:
            return RowCommit(self.index, (), 0, 0, "plain", transcript.end("error"), "error")
        tokens, text = transcript.feed(said)
        if accepted > len(tokens):
            accepted = len(tokens)
        self._rounds[source, offered, accepted] += 1
        self._ended = perf_counter()
        if not self._first:
            self._first = self._ended
        return new(RowCommit, (self.index, tokens, accepted, offered, source, text, transcript.finish, ()))

    def report(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Keep the log-probabilities of the tokens just committed."""
        self._logprobs.extend(logprobs)

    def fail(self, error: Exception) -> None:
        """Note an error; the next commit ends the row with it."""
        self.error = str(error) or type(error).__name__

    def fork(self) -> Row:
        twin = copy.copy(self)
        twin.transcript = self.transcript.fork()
        twin._rounds, twin._logprobs = self._rounds.copy(), list(self._logprobs)
        return twin

    def result(self) -> Result:
        """Host counts only; may be asked for at any time."""
        deepest = max((offered for _, offered, _ in self._rounds), default=0)
        positions = tuple(
            (
                sum(n for (_, offered, _), n in self._rounds.items() if offered > i),
                sum(n for (_, _, accepted), n in self._rounds.items() if accepted > i),
            )
            for i in range(deepest)
        )
        sources: Counter[str] = Counter()
        for (source, _, _), n in self._rounds.items():
            sources[source] += n
        return Result(
            tokens=tuple(self.transcript.tokens),
            text=self.transcript.text,
            finish=self.transcript.finish,
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached_tokens,
            rounds=sum(self._rounds.values()),
            offered_tokens=sum(offered * n for (_, offered, _), n in self._rounds.items()),
            accepted_tokens=sum(accepted * n for (_, _, accepted), n in self._rounds.items()),
            by_position=positions,
            by_source=dict(sources),
            prefill_s=self._prefilled - self._opened,
            ttft_s=max(self._first - self._opened, 0.0),
            decode_s=max(self._ended - self._prefilled, 0.0),
            logprobs=tuple(self._logprobs),
            error=self.error,
        )


def with_logprobs(
    rows: Sequence[Row], commits: Sequence[RowCommit], logprobs: Sequence[tuple[TokenLogprobs, ...]]
) -> list[RowCommit]:
    """The commits with their tokens' log-probabilities, which the rows keep; none of a row that failed."""
    told = []
    for row, commit, own in zip(rows, commits, logprobs, strict=True):
        if row.error is None:
            row.report(own)
            commit = commit._replace(logprobs=own)
        told.append(commit)
    return told
