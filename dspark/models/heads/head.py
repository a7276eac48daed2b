"""The drafter network: context rows from taps, block rows from the anchor, logits from block rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from dspark.errors import BindError
from dspark.models.heads.config import HeadConfig
from dspark.models.heads.context import Context, LayerRows
from dspark.models.heads.layers import DraftLayer, Norm, Sight
from dspark.models.heads.parts import CandidateSelector, ConfidenceHead, LogSnrEmbed, MarkovHead
from dspark.models.heads.rope import Rope

Table = Callable[[mx.array], mx.array]


@attrs.define
class Tables:
    """The target's tables, kept apart from the head's own parameters: training and saving must not see them."""

    embed: Table | None = None
    lm_head: Table | None = None


class Head(nn.Module):
    """A block drafter. Parameters are named as published checkpoints name them.

    A round: `absorb` the taps of the tokens that were committed, run the `block` at the anchor, take `base_logits` of its
    predicting rows, and draft from those (`dspark.models.heads.draft`). Nothing in it reads from the device.
    """

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = c = config
        self.fc = nn.Linear(len(c.target_layer_ids) * c.target_hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = Norm(c.hidden_size, c.rms_norm_eps, c.offset_norms)
        self.layers = [DraftLayer(c) for _ in c.layers]
        self.norm = Norm(c.hidden_size, c.rms_norm_eps, c.offset_norms)
        if c.embedding == "own":
            self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        if c.lm_head == "own":
            self.lm_head = nn.Linear(c.hidden_size, c.head_vocab_size, bias=False)
        if c.markov != "none":
            self.markov_head = MarkovHead(c)
        if c.confidence != "none":
            self.confidence_head = ConfidenceHead(c)
        if c.selector_rank:
            self.candidate_selector = CandidateSelector(c)
        if c.log_snr is not None:
            self.log_snr_embed = LogSnrEmbed(c)
        self.rope = Rope(c.rope, c.head_dim)
        self.tables = Tables()
        # Where it was loaded from, if it was.
        self.about: Any = None
        # A round in one launch (`kernels.stack_draft.DraftRound`), where this machine has it for this drafter.
        self.launch: Any = None
        self.target_vocab_size = c.vocab_size
        # Row of lm_head -> token of the target; underscored, for it is no parameter.
        self._target_ids = None

    @property
    def dtype(self) -> mx.Dtype:
        return self.norm.weight.dtype

    @property
    def target_ids(self) -> mx.array | None:
        """int32 [draft_vocab_size]: the target's token for each row of a reduced lm_head; None for a whole one."""
        return self._target_ids

    def bind(self, embed: Table | None, lm_head: Table | None, target_vocab_size: int | None = None) -> None:
        """Lend the target's tables: `embed` ids -> raw rows (the table's own, not scaled), `lm_head` hidden -> raw logits.

        `target_vocab_size`: columns of the target's logits, where they are more than the drafter's. Raises BindError where
        a table that the drafter lacks is not lent.
        """
        needed = (("embedding", self.config.embedding, embed), ("lm_head", self.config.lm_head, lm_head))
        for name, kind, table in needed:
            if kind == "borrowed" and table is None:
                raise BindError(
                    f"this drafter has no {name} of its own and the target lends none; take a drafter that has"
                )
        self.tables = Tables(embed, lm_head)
        self.target_vocab_size = target_vocab_size or self.config.vocab_size

    def reduce_vocabulary(self, target_ids: mx.array) -> None:
        """Say which token of the target each row of a reduced lm_head is."""
        self._target_ids = target_ids.astype(mx.int32)

    def embed(self, ids: mx.array) -> mx.array:
        """Rows for ids [...]: [..., H], scaled as this drafter wants them."""
        table = self.embed_tokens if self.config.embedding == "own" else self.tables.embed
        if table is None:
            raise BindError("this drafter borrows its embedding; bind it to a target first")
        rows = table(ids).astype(self.dtype)
        return rows if self.config.embedding_scale == 1.0 else rows * self.config.embedding_scale

    def context(self, taps: mx.array) -> mx.array:
        """Context rows [B, L, H] of taps [B, L, T * H_target], which are concatenated in the order of the layer ids."""
        return self.hidden_norm(self.fc(taps.astype(self.dtype)))

    def make_context(self, starts: Sequence[int] = (0,), window: int | None = None) -> Context:
        """An empty context, one entry of `starts` a batch row: the position of its first row to come.

        `window`: let layers without a window of their own see only so many context rows before the anchor.
        """
        origins = tuple(starts)
        rows = []
        for layer in self.config.layers:
            limits = [n for n in (window, layer.window and layer.window - 1) if n is not None]
            rows.append(LayerRows(layer, min(limits, default=None), origins))
        return Context(tuple(rows), origins)

    def absorb(self, context: Context, taps: mx.array, keep: int | Sequence[int] | None = None) -> Context:
        """Take in taps [B, W, T * H_target] at the context's `starts`, and move those by `keep` (one number a row; None: W).

        All W rows are projected and written, so a round has no new shape; those behind `keep` will be overwritten. The
        write is in place once what read the buffers has run, so call this after the round's read. Raises ValueError for a
        `keep` beyond W.
        """
        batch, width = taps.shape[:2]
        kept = (width if keep is None else keep,) * batch if keep is None or isinstance(keep, int) else tuple(keep)
        if len(kept) != batch or len(context.starts) != batch or not all(0 <= k <= width for k in kept):
            raise ValueError(f"keep {kept} for taps of {width} rows and a context of {len(context.starts)}")
        self._leave_launch(context)
        rows = self.context(taps)
        for layer, store in zip(self.layers, context.rows, strict=True):
            self._write(layer, store, rows, context.starts, kept)
        return Context(context.rows, tuple(s + k for s, k in zip(context.starts, kept, strict=True)))

    def _write(
        self, layer: DraftLayer, store: LayerRows, rows: mx.array, starts: tuple[int, ...], kept: tuple[int, ...]
    ) -> None:
        # Of a long prompt a windowed layer sees the end only: the rest is neither projected nor held.
        skip = 0 if store.limit is None or len(set(kept)) > 1 else max(0, kept[0] - store.limit)
        if skip:
            rows, starts = rows[:, skip:], tuple(s + skip for s in starts)
            store.restart(starts)
        keys, values = layer.self_attn.keys_values(rows)
        store.write(self.rope(keys, _offset(starts)), values, starts)

    def block(
        self, context: Context, anchor: mx.array, slots: int | None = None, trace: list[mx.array] | None = None
    ) -> mx.array:
        """Hidden rows [B, slots, H] of the block [anchor, mask, mask, ...], behind the final norm. anchor [B, 1].

        `slots` fewer than the block are allowed where every layer is causal (`config.slots_for`). `trace` receives the
        embedded block and each layer's output. Raises ValueError for other `slots`.
        """
        c = self.config
        slots = c.block_size if slots is None else slots
        if not 1 <= slots <= c.block_size or (slots < c.block_size and not c.causal):
            raise ValueError(
                f"{slots} slots of a block of {c.block_size}{'' if c.causal else ', which is computed whole'}"
            )
        self._leave_launch(context)
        x = self.embed_block(anchor, slots)
        if trace is not None:
            trace.append(x)
        offset = _offset(context.starts)
        rotate = lambda t: self.rope(t, offset)
        for layer, store in zip(self.layers, context.rows, strict=True):
            x = layer(x, Sight(rotate, _joiner(store, context.starts, slots)))
            if trace is not None:
                trace.append(x)
        return self.norm(x)

    def _leave_launch(self, context: Context) -> None:
        """Buffers are written here now, and no more by the launch."""
        if self.launch is not None:
            self.launch.leave(context)

    def embed_block(self, anchor: mx.array, slots: int) -> mx.array:
        """The block's input rows: anchor [..., 1] -> [..., slots, H]."""
        masks = mx.full((*anchor.shape[:-1], slots - 1), self.config.mask_token_id, dtype=anchor.dtype)
        x = self.embed(mx.concatenate([anchor, masks], axis=-1))
        return x + self.log_snr_embed(slots) if self.config.log_snr is not None else x

    def base_logits(self, hidden: mx.array) -> mx.array:
        """Logits float32 [..., head_vocab_size] of hidden rows [..., H], before any Markov bias or selector."""
        c = self.config
        if c.lm_head == "tied":
            logits = self.embed_tokens.as_linear(hidden)
        else:
            table = self.lm_head if c.lm_head == "own" else self.tables.lm_head
            if table is None:
                raise BindError("this drafter borrows its lm_head; bind it to a target first")
            logits = table(hidden)
        # A padded table yields columns that are no tokens.
        logits = logits[..., : c.head_vocab_size].astype(mx.float32)
        if c.logit_multiplier != 1.0:
            logits = logits * c.logit_multiplier
        if c.logit_softcap is not None:
            logits = mx.tanh(logits / c.logit_softcap) * c.logit_softcap
        return logits

    def predicting(self, hidden: mx.array, cap: int) -> mx.array:
        """The rows of a block that predict the first `cap` drafts: [B, cap, H]."""
        first = self.config.first_slot
        return hidden[:, first : first + cap]

    def widen(self, logits: mx.array) -> mx.array:
        """Logits [..., head_vocab_size] over the target's whole vocabulary, -inf where the drafter has no row."""
        shape = (*logits.shape[:-1], self.target_vocab_size)
        if self._target_ids is not None:
            places = mx.broadcast_to(self._target_ids, logits.shape)
            return mx.put_along_axis(mx.full(shape, -mx.inf, dtype=logits.dtype), places, logits, axis=-1)
        short = self.target_vocab_size - logits.shape[-1]
        if not short:
            return logits
        return mx.concatenate([logits, mx.full((*shape[:-1], short), -mx.inf, dtype=logits.dtype)], axis=-1)

    def step_logits(self, base: mx.array, hidden: mx.array, previous: mx.array) -> mx.array:
        """Logits of slots whose previous tokens are known (training, replay): base [..., K, V], hidden [..., K, H],
        previous [..., K] ids of the target. Equals `base` for a head without a Markov part."""
        if self.config.markov == "none":
            return base
        bias = self.markov_head.markov_w2(self.markov_head.features(previous, hidden))
        return base + bias.astype(mx.float32)

    def confidence(self, hidden: mx.array, previous: mx.array) -> mx.array:
        """Logits float32 [..., K] of each draft standing if those before it do: hidden [..., K, H], previous [..., K].

        The k-th looks at nothing later than the token in front of the k-th draft, so cutting by it keeps the text's law.
        Raises BindError for a head without a confidence head.
        """
        c = self.config
        if c.confidence == "none":
            raise BindError("this drafter has no confidence head; drop the confidence threshold")
        features = hidden
        if c.confidence == "markov":
            features = mx.concatenate([hidden, self.markov_head.markov_w1(previous).astype(hidden.dtype)], axis=-1)
        logits = self.confidence_head(features).astype(mx.float32)
        if not c.confidence_temperatures:
            return logits
        return logits / mx.array(c.confidence_temperatures[: logits.shape[-1]])


def _offset(starts: tuple[int, ...]) -> int | mx.array:
    return starts[0] if len(set(starts)) == 1 else mx.array(starts)


def _joiner(store: LayerRows, starts: tuple[int, ...], slots: int) -> Callable:
    def join(keys: mx.array, values: mx.array):
        store.write(keys, values, starts)
        return store.seen(starts, slots)

    return join
