"""The records that stages hand over. Small, typed, immutable; every one carries a leading batch of B rows.

Shapes: B rows, K drafted tokens, W = K + 1 rows verified, V vocabulary, F = taps x hidden size, C candidates of a sparse q.
Tuples with one entry a row are host values; `mx.array` fields are on the device and may not be computed yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import mlx.core as mx

Tokens = tuple[int, ...]

# Makes a record inside the loop, `new(Settled, (anchor, ...))`: in half the time of the record's own constructor, which is a
# Python function.
new = tuple.__new__


class Settled(NamedTuple):
    """Committed tokens: all but the last (the anchor) stand in the caches.

    anchor [B, 1] int32; tokens: what was committed since the last record, per row, the anchor last (None while a round sent
    ahead is in flight); taps [B, W, F] or None: hidden states of the rows fed last; keep: how many leading rows of `taps`
    stand, their positions ending right before the anchor; start: the anchor's absolute position; whole: whether every row kept
    all that stood, so that the anchor is what the round itself found to follow; sent [1, K + 1] or None: the next round's block,
    where the target is at work on it already.
    """

    anchor: mx.array
    tokens: tuple[Tokens, ...] | None
    taps: mx.array | None
    keep: tuple[int, ...]
    start: tuple[int, ...]
    whole: bool = False
    sent: mx.array | None = None


class SparseQ(NamedTuple):
    """A proposal's distribution on C candidates a slot: ids [B, K, C] int32, probs [B, K, C] float32, zero elsewhere."""

    ids: mx.array
    probs: mx.array


class DenseQ(NamedTuple):
    """A proposal's distribution over the vocabulary: probs [B, K, V] float32."""

    probs: mx.array


class Proposal(NamedTuple):
    """Drafts behind the anchor. anchor [B, 1]; tokens [B, K] int32; offered: how many of the K count, per row (the rest is
    padding and is rejected); q: what the drafter drew from, None for one certain token a slot; source: who drafted
    ("lookup", "dspark", ..., "plain" for none); start as in `Settled`; keep [B] int32 or None: how many drafts the drafter
    itself still believes in, which the driver reads (a second read) and cuts the block to; block [B, K + 1] int32 or None:
    anchor and tokens side by side, where they lie so; waits: whether another drafter's drafts wait behind this block, with which
    the target was at work already."""

    anchor: mx.array
    tokens: mx.array
    offered: tuple[int, ...]
    q: SparseQ | DenseQ | None
    source: tuple[str, ...]
    start: tuple[int, ...]
    keep: mx.array | None = None
    block: mx.array | None = None
    waits: bool = False


class Said(NamedTuple):
    """What greedy decoding says of a block, where the target's forward finds it along the way: choice [B, W] int32, accepted [B]
    and following [B] int32, all drafts counted as offered; report [B, W + 1] int32: accepted, following and the drafts; words:
    the same for one row, as the host reads it, two numbers [2] int32 in each. (MLX on CUDA keeps 8 bytes where host and device
    both reach them; to read any other array it may wait for all that was sent.)"""

    choice: mx.array
    accepted: mx.array
    following: mx.array
    report: mx.array
    words: tuple[mx.array, ...]


class Verdict(NamedTuple):
    """The target's word on a proposal: logits [B, K + 1, V], row i judging draft i + 1; taps [B, K + 1, F] or None; said: what
    greedy decoding makes of the logits as they are, None where nobody looked."""

    proposal: Proposal
    logits: mx.array
    taps: mx.array | None
    said: Said | None = None


class Logprobs(NamedTuple):
    """Log-probabilities behind penalties and biases, before temperature and truncation.

    chosen [B, K + 1]; top ids and values [B, K + 1, n] (n may be 0). Row i belongs to the token at position start + 1 + i;
    rows behind the accepted count are meaningless.
    """

    chosen: mx.array
    top_ids: mx.array
    top_values: mx.array


class Acceptance(NamedTuple):
    """How many drafts stand, accepted [B] int32, and the token behind them, next [B] int32 (bonus or correction); report: both and
    the drafts in one array, as in `Said`, or None."""

    verdict: Verdict
    accepted: mx.array
    next: mx.array
    logprobs: Logprobs | None = None
    report: mx.array | None = None


class State(NamedTuple):
    """What a round consumes: `epoch` ties it to the buffers; carries belong to the stages."""

    epoch: int
    settled: Settled
    draft: Any
    accept: Any
    cap: Any


class Opening(NamedTuple):
    """What stages may know when a session opens: the target, the prompts (host tokens, per row), a seed a row, the accept stage."""

    target: Any
    prompts: tuple[Tokens, ...]
    seeds: tuple[int, ...]
    accept: Any = None


class TokenLogprobs(NamedTuple):
    """Log-probability of a committed token and of the n likeliest ones, as (token, log-probability)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class RowCommit(NamedTuple):
    """What one row committed in a round: host values only.

    index: the prompt's place in the list that the session was opened with; tokens: committed tokens (a stop token
    included); accepted: how many of them a draft said, from the front; offered: drafts shown to the target; source: who
    drafted; text: what may be shown now; finish: None, "stop", "length", "cancelled" or "error"; logprobs: one entry a
    token, when asked for.
    """

    index: int
    tokens: Tokens
    accepted: int
    offered: int
    source: str
    text: str = ""
    finish: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def from_draft(self) -> tuple[bool, ...]:
        """For each committed token, whether a draft said it."""
        return tuple(i < self.accepted for i in range(len(self.tokens)))


class Commit(NamedTuple):
    """One round's result for every row. `text`, `tokens`, `finish` are those of row 0, for sessions of one prompt."""

    rows: tuple[RowCommit, ...]
    round: int
    cap: int

    @property
    def text(self) -> str:
        return self.rows[0].text

    @property
    def tokens(self) -> Tokens:
        return self.rows[0].tokens

    @property
    def finish(self) -> str | None:
        return self.rows[0].finish


class Shadow(NamedTuple):
    """One row's drafts that were made beside plain steps, and how many of them those steps said too."""

    source: str
    offered: int
    accepted: int


class RoundEvent(NamedTuple):
    """Telemetry of a round, host values only. Times in milliseconds; `round` counts from 1.

    cap: most drafts offered; cap_reason: why ("pinned", "calibrated", "adaptive", "parked", "default (not calibrated)");
    width: rows verified; reads: device reads; elapsed_ms: from the last round's end to this one's; predicted_ms: what the
    cost curve said, or None; context_tokens: tokens held per row; owed_tokens: tokens to be fed again; memory_bytes: active
    device memory; shadow: most drafts that were made beside this round, only to be judged; judged: those made beside an
    earlier one, judged by this; ahead: whether a drafted round's forward was sent before the round in front was read.
    """

    round: int
    rows: tuple[RowCommit, ...]
    cap: int
    cap_reason: str
    width: int
    reads: int
    elapsed_ms: float
    context_tokens: tuple[int, ...]
    owed_tokens: int = 0
    memory_bytes: int = 0
    predicted_ms: float | None = None
    shadow: int = 0
    judged: tuple[Shadow, ...] = ()
    ahead: bool = False
