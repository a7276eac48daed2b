"""Stand-ins with known answers: a target whose next token depends on every earlier one, and drafters that follow a script."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from dspark.records import Opening, Proposal, Settled
from dspark.stages.base import AbstractDraft, no_proposal

VOCAB = 61


class HashTarget:
    """The state after a token is a hash of all terms in its cache; a fixed random table turns states into logits.

    A stale, missing or extra cache row changes every later token, so nothing rolled back wrongly goes unnoticed. Exact in
    float32: all sums stay far below 2^24.
    """

    name = "hash"
    hidden_size, vocab_size, num_layers = 8, VOCAB, 4
    context_length: int | None = None
    provides = frozenset({"logits", "taps"})

    def __init__(self, scale: float = 3.0, seed: int = 0, cache: type = KVCache):
        self.table = mx.array(np.random.default_rng(seed).normal(0, scale, (VOCAB, VOCAB)).astype(np.float32))
        self.cache = cache
        self.forwards = 0

    def make_caches(self) -> list[Any]:
        return [self.cache()]

    def states(self, ids: mx.array, caches: Sequence[Any]) -> mx.array:
        cache, (rows, width) = caches[0], ids.shape
        start = cache.offset if isinstance(cache.offset, mx.array) else mx.array(cache.offset)
        places = start.reshape(-1, 1) + mx.arange(width)[None] + 1
        mask = cache.make_mask(width, window_size=None, return_array=True)
        terms = ((ids * 7 + places * 13 + ids * places * 5 + ids * ids * places * 3) % VOCAB).astype(mx.float32)
        terms = mx.broadcast_to(terms[:, None, :, None], (rows, 1, width, 1))
        keys, _ = cache.update_and_fetch(terms, terms)
        seen = mx.ones((1, keys.shape[2])) if mask is None else mask.astype(mx.float32)
        total = (seen * keys[..., 0][:, :, None, :]).sum(axis=-1).reshape(rows, width)
        return (total.astype(mx.int32) * 31 + 11) % VOCAB

    def __call__(self, ids: mx.array, caches: Sequence[Any], target_layer_ids: tuple[int, ...] = ()) -> tuple[Any, Any]:
        self.forwards += 1
        states = self.states(ids, caches)
        taps = None
        if target_layer_ids:
            one = (states[..., None] + mx.arange(self.hidden_size)).astype(mx.float32)
            taps = mx.concatenate([one + i for i in target_layer_ids], axis=-1)
        return self.table[states], taps


def plain(target: Any, prompt: Sequence[int], length: int) -> list[int]:
    """Greedy decoding, one token a forward, by nothing but the target and its own caches."""
    caches, out, ids = target.make_caches(), [], list(prompt)
    for _ in range(length):
        logits, _ = target(mx.array([ids]), caches)
        out.append(mx.argmax(logits[0, -1]).item())
        ids = [out[-1]]
    return out


@attrs.frozen
class ScriptedDraft(AbstractDraft):
    """Proposes the truth, spoiling each token with probability 1 - rate; the truth starts with the prompt, per row.

    Its carry counts what it was told, so that a driver that forgets to tell it is noticed.
    """

    truth: tuple[tuple[int, ...], ...]
    rate: float = 1.0
    seed: int = 0
    taps: tuple[int, ...] = ()
    vocab: int = VOCAB

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return self.taps

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"host_tokens"} | ({"taps"} if self.taps else set()))

    @property
    def sources(self) -> tuple[str, ...]:
        return ("scripted",)

    def init(self, opening: Opening) -> tuple[tuple[tuple[int, ...], int], ...]:
        truths = [next(t for t in self.truth if t[: len(p)] == p) for p in opening.prompts]
        return tuple((truth, 0) for truth in truths)

    def skip(self, settled: Settled, carry: Any) -> Any:
        out = []
        for (truth, told), tokens, start in zip(carry, settled.tokens, settled.start, strict=True):
            fresh = start + 1 - told
            assert fresh <= len(tokens), f"told {told} tokens, then handed {len(tokens)} that end at {start}"
            out.append((truth, start + 1))
        if self.taps and settled.taps is not None:
            assert settled.taps.shape[-1] == len(self.taps) * HashTarget.hidden_size
        return tuple(out)

    def __call__(self, settled: Settled, carry: Any, cap: int) -> tuple[Proposal, Any]:
        carry = self.skip(settled, carry)
        rows = []
        for truth, told in carry:
            dice = random.Random(f"{self.seed} {told}")
            rows.append([t if dice.random() < self.rate else (t + 1) % self.vocab for t in truth[told : told + cap]])
        width = max(map(len, rows))
        if not width:
            return no_proposal(settled), carry
        tokens = mx.array([r + [0] * (width - len(r)) for r in rows], dtype=mx.int32)
        source = tuple("scripted" if r else "plain" for r in rows)
        return Proposal(settled.anchor, tokens, tuple(map(len, rows)), None, source, settled.start), carry


class ScriptTarget(HashTarget):
    """Says a given list of tokens, by position: script[p] follows the token at position p."""

    name = "script"

    def __init__(self, script: Sequence[int], vocab: int = 260, cache: type = KVCache):
        super().__init__(cache=cache)
        self.script, self.vocab_size = mx.array(list(script)), vocab
        self.length = len(script)

    def __call__(self, ids: mx.array, caches: Sequence[Any], target_layer_ids: tuple[int, ...] = ()) -> tuple[Any, Any]:
        self.forwards += 1
        start = caches[0].offset
        self.states(ids, caches)
        places = mx.minimum(start + mx.arange(ids.shape[1]), self.length - 1)
        said = self.script[places][None]
        return 9.0 * (said[..., None] == mx.arange(self.vocab_size)).astype(mx.float32), None


STOP = 256


def byte_tokenizer() -> Any:
    """mlx-lm's tokenizer wrapper over one token a byte (ids 0 to 255), <stop> = 256 and its byte-level detokenizer."""
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    visible = bytes_to_visible()
    inner = Tokenizer(models.BPE(vocab={visible[b]: b for b in range(256)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<stop>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<stop>", clean_up_tokenization_spaces=False)
    return TokenizerWrapper(fast, BPEStreamingDetokenizer)


def bytes_to_visible() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    plain_bytes = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in plain_bytes}
    table |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in table)}
    return table
